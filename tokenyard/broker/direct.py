"""A Redis client with a short way from a command to its answer.

redis-py spends 45 of the 55 µs of a small command on what a queue does not need each time: a look
at the socket before each use, a lock around the pool, counters for telemetry, layers around each
read. Here a connection that was just used is used again as it is, and its socket directly.
Connecting, parsing, retries, TLS, users and errors stay redis-py's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final

import hiredis
import redis
from redis.connection import AbstractConnection

from tokenyard.broker.pools import IdleConnections, WaitingPool

#: A connection that was left alone for longer may have been closed by the server meanwhile, so
#: redis-py looks before it is used.
FRESH_S: Final = 1.0


class DirectRedis(redis.Redis):
    """`redis.Redis`, quick with single commands and scripts; as safe for several threads.

    Quick over a `tokenyard.broker.pools.WaitingPool`; over another pool, such as the one that RQ
    makes for its scheduler, it is redis-py's own client.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: When each connection was used last; redis-py gives no types for them.
        self._used_at: dict[Any, float] = {}

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Give a command and read its answer, as often as the connection's retries allow."""
        if not isinstance(self.connection_pool, WaitingPool):
            run: Any = super().execute_command
            return run(*args, **options)
        options.pop("keys", None)  # of use to redis-py's cache only
        connection = self._take()
        callbacks: Any = self.response_callbacks
        read = callbacks.get(args[0])
        try:
            command = _packed(connection, args)

            def ask() -> Any:
                sock = _socket_of(connection)
                if options or sock is None:
                    connection.send_packed_command(command)
                    return parse(connection, args[0], **options)
                answer = _talk(connection, sock, command)
                return read(answer) if read else answer

            parse: Any = self.parse_response
            return connection.retry.call_with_retry(ask, lambda _: connection.disconnect())
        finally:
            self._used_at[connection] = time.monotonic()
            self._idle().put_nowait(connection)

    def _take(self) -> Any:
        """The connection that was used last as it is, or one that redis-py has looked at."""
        pool = self.connection_pool
        if pool.pid == os.getpid():  # else forked: the connections are the parent's
            idle = self._idle()
            connection = idle.take()
            if connection is not None:
                if time.monotonic() - self._used_at.get(connection, -FRESH_S) <= FRESH_S:
                    return connection
                idle.put_nowait(connection)
        return pool.get_connection()

    def _idle(self) -> IdleConnections:
        pool: Any = self.connection_pool
        idle: IdleConnections = pool.idle
        return idle


def _socket_of(connection: Any) -> Any:
    """Its socket; None where it has none, or reads in a way of its own that must be kept."""
    is_plain = type(connection).read_response is AbstractConnection.read_response
    return connection._sock if is_plain else None  # noqa: SLF001 - redis-py has no public way


def _talk(connection: Any, sock: Any, command: Sequence[bytes]) -> Any:
    """Send a command and read its answer over the socket; raises what redis-py would."""
    try:
        for part in command:
            sock.sendall(part)
        answer = connection._parser.read_response()  # noqa: SLF001 - redis-py has no public way
    except OSError as fault:
        connection.disconnect()
        kind = redis.TimeoutError if isinstance(fault, TimeoutError) else redis.ConnectionError
        raise kind(f"sending a command: {fault}") from fault
    except BaseException:
        connection.disconnect()  # an answer that comes late would be taken for the next one's
        raise
    if isinstance(answer, redis.ResponseError):
        raise answer
    return answer


def _packed(connection: Any, args: tuple[Any, ...]) -> Sequence[bytes]:
    """A command as it is sent; without redis-py's look at each of thousands of arguments.

    It is looking for names of two words, and for kinds of values that hardly anybody gives.
    """
    if " " not in args[0]:
        try:
            return [hiredis.pack_command(args)]
        except TypeError:
            pass  # redis-py knows what to do with it, or has the better words
    packed: Sequence[bytes] = connection.pack_command(*args)
    return packed
