"""A follower's connection to its leader."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import TypeVar

from tokenyard import clock
from worker.engines import RankGroup
from worker.executor.messages import (
    Build,
    Built,
    ConnectionLost,
    Dismissed,
    FromLeader,
    GroupError,
    Hello,
    Join,
    Joined,
    Leave,
    Left,
    RankFailed,
)

CONNECT_S = 120.0  # until the leader listens
MESSAGE_S = 1800.0  # until the leader's next message; its death is noticed immediately
STUCK_S = 30.0  # inside vLLM after the group has ended
_RETRY_S = 0.02

Expected = TypeVar("Expected", Build, Join)


class FollowerLink:
    """The connection, and a thread that waits for the end of the group."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._line: Connection | None = None
        self._end: FromLeader | ConnectionLost | None = None  # the leader's last message
        self._ended = threading.Event()
        self._finished = threading.Event()
        self._wake: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._wake_pipe: Connection | None = None

    def connect(self) -> None:
        """Connect to the leader.

        Raises `GroupError` if it does not accept in time, `Dismissed` if it closes the connection.
        """
        line = self._line = self._connect()
        key = multiprocessing.current_process().authkey
        try:
            if not line.poll(MESSAGE_S):
                raise GroupError(f"the leader did not accept within {MESSAGE_S:g} s")
            answer_challenge(line, key)
            deliver_challenge(line, key)
            line.send(Hello(self._group.rank))
        except (EOFError, ConnectionError) as error:
            raise Dismissed("the leader no longer listens") from error

    def say(self, message: Built | Joined | Left | RankFailed) -> None:
        """Send a message to the leader if it is still connected."""
        with contextlib.suppress(OSError):
            self._opened.send(message)

    def hear(self, kind: type[Expected]) -> Expected:
        """The leader's next message. Raises `Dismissed`, or `GroupError` if it died."""
        if not self._opened.poll(MESSAGE_S):
            raise GroupError(f"the leader sent nothing for {MESSAGE_S:g} s")
        message = self._receive()
        if isinstance(message, kind):
            return message
        raise _ending(message)

    def watch(self, wake: Callable[[], None]) -> None:
        """Start a thread that calls ``wake`` when the group ends."""
        self._wake = wake
        wakeup, self._wake_pipe = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(
            target=self._listen, args=(wakeup,), name="group", daemon=True
        )
        self._thread.start()

    def await_end(self, timeout_s: float) -> None:
        """Wait until the group ends; raises like `check`."""
        clock.wait(self._ended, timeout_s)
        self.check()
        raise GroupError(f"the leader did not dismiss this rank within {timeout_s:g} s")

    def check(self) -> None:
        """Raise `Dismissed`, or `GroupError` if the leader died."""
        if self._end is not None:
            raise _ending(self._end)

    def unwatch(self) -> None:
        """Stop the thread, because nothing waits for other ranks any more; idempotent."""
        self._finished.set()
        if self._wake_pipe is not None:
            self._wake_pipe.close()
        if self._thread is not None:
            self._thread.join()
        self._wake = None

    def close(self) -> None:
        """Close the connection; idempotent."""
        self.unwatch()
        if self._line is not None:
            self._line.close()

    @property
    def _opened(self) -> Connection:
        if self._line is None:
            raise GroupError("not connected to the leader")
        return self._line

    def _connect(self) -> Connection:
        until = clock.monotonic() + CONNECT_S
        while True:
            try:
                return Client(self._group.address, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if clock.monotonic() > until:
                    raise GroupError(f"nobody leads the group at {self._group.address}") from error
                clock.sleep(_RETRY_S)

    def _receive(self) -> FromLeader | ConnectionLost:
        try:
            message: FromLeader = self._opened.recv()
        except (EOFError, OSError):
            return ConnectionLost()
        return message

    def _listen(self, wakeup: Connection) -> None:
        if wakeup in wait([self._opened, wakeup]):
            return
        self._end = self._receive()
        self._ended.set()
        if self._wake is not None:
            self._wake()
        # As in the leader: a collective may wait for a dead rank forever.
        if not clock.wait(self._finished, STUCK_S):
            raise GroupError(f"still inside vLLM {STUCK_S:g} s after the group has ended")


def _ending(message: FromLeader | ConnectionLost) -> Dismissed | GroupError:
    match message:
        case Leave():
            return Dismissed("the leader dismissed this rank")
        case ConnectionLost():
            return GroupError("the leader of the group has died")
        case _:
            return GroupError(f"unexpected message of the leader: {message}")
