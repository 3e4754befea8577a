"""How many instructions of the broker does one delta of a stream cost?

Valgrind counts those of a server on which a worker publishes the deltas of many streams, a step at
a time, and their reader reads and deletes them. Two runs of different length are subtracted, so
that only deltas are left. Wall time on a shared machine would be noise.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import redis

from tokenyard.process.embedded_broker import free_port
from tokenyard.process.servers import embedded_server
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment, Request, SamplingParams, pack_tokens
from tokenyard.protocol.worker_info import WorkerInfo, encode_worker
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Move, Publication
from tokenyard.scripts.calls import destination
from worker.process.publisher import TRUSTED_MS

#: In one stream for all requests, or each on its own.
Way = Literal["frames", "flat"]

_LEASE_MS: Final = 3_600_000
_START_S: Final = 60.0
_COLLECTED: Final = re.compile(r"Collected : (\d+)")
_STEPS: Final = (20, 120)
#: A worker with a step in 30 ms lets so many follow before the attempts are compared again.
_TRUSTED_STEPS: Final = TRUSTED_MS // 30


def instructions_per_delta(way: Way, streams: int, tokens: int = 1) -> float | None:
    """For deltas of so many tokens; None without valgrind."""
    if shutil.which("valgrind") is None:
        return None
    few, many = (_instructions(way, streams, tokens, steps) for steps in _STEPS)
    return (many - few) / (streams * (_STEPS[1] - _STEPS[0]))


def _instructions(way: Way, streams: int, tokens: int, steps: int) -> int:
    with _counted_server() as (connection, count):
        _play(connection, way, streams, tokens, steps)
        return count()


@contextmanager
def _counted_server() -> Iterator[tuple[redis.Redis, Callable[[], int]]]:
    """A server under valgrind, and a function that ends it and returns its instructions."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        server = subprocess.Popen(
            [
                *("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"),
                *(str(embedded_server()), "--port", str(port), "--bind", "127.0.0.1"),
                *("--save", "", "--dir", folder),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection = redis.Redis(port=port, socket_timeout=_START_S)

        def count() -> int:
            connection.shutdown(nosave=True)
            _, said = server.communicate(timeout=_START_S)
            found = _COLLECTED.search(said)
            if found is None:
                sys.exit(f"valgrind counted nothing:\n{said}")
            return int(found[1])

        try:
            _wait_for(connection)
            yield connection, count
        finally:
            connection.close()
            server.kill()
            server.wait()


def _wait_for(connection: redis.Redis) -> None:
    give_up = time.monotonic() + _START_S
    while True:
        try:
            connection.ping()
        except redis.ConnectionError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)
        else:
            return


def _play(connection: redis.Redis, way: Way, streams: int, tokens: int, steps: int) -> None:
    keys = Keys("bench")
    scripts = Scripts(Yard(connection, keys))
    held = _assignments(scripts, way, streams)
    worker = held[0][1]
    read: dict[Any, Any] = {destination(keys, one.request)[0]: "0" for one, _ in held}
    for step in range(steps):
        made, seq = pack_tokens([step % 128] * tokens), step * tokens
        deltas = [
            Publication(
                one,
                Reply(id=one.request.id, event="delta", seq=seq, tokens=made),
                is_trusted=step % _TRUSTED_STEPS > 0,
            )
            for one, _ in held
        ]
        scripts.emit(worker, deltas, sys.maxsize // 1000)
        answer: Any = connection.xread(read)
        read |= {key.decode(): entries[-1][0] for key, entries in answer}
        if way == "frames" and step % 50 == 0:
            [(stream, last)] = read.items()
            connection.xtrim(stream, minid=last)


def _assignments(scripts: Scripts, way: Way, streams: int) -> Sequence[tuple[Assignment, str]]:
    """Streams on the lane of a worker, and the worker."""
    token = scripts.lead("bench", _LEASE_MS)
    info = WorkerInfo(name="w", state="ready", model="m", lane_limit=streams)
    worker = scripts.register("w", _LEASE_MS, encode_worker(info))
    reply_to = f"replies:gateway.{'0' * 32}" if way == "frames" else ""
    requests = [
        Request(
            id=f"cmpl-{number:032x}-0",
            client="http.acme",
            tokens=pack_tokens(range(16)),
            params=SamplingParams(max_tokens=1_000),
            stream=True,
            reply_to=reply_to,
        )
        for number in range(streams)
    ]
    accepted = scripts.submit("normal", requests)
    scripts.dispatch(
        token,
        [
            Move(
                "normal",
                one.sid.partition("/")[2],
                request.client,
                request.id,
                worker,
                streams,
                digest=request_digest(request),
            )
            for request, one in zip(requests, accepted, strict=True)
        ],
    )
    entries: Any = scripts.yard.connection.xrange(scripts.keys.lane(worker))
    found = [parse_assignment(entry.decode(), fields) for entry, fields in entries]
    return [(one, worker) for one in found if one is not None]
