"""Takes back what workers without a lease hold."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis

from coordinator.routing.suspicion import CrashAnalysis, read_mark
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.parse import unfold
from tokenyard.protocol.wire import DEFAULT_CLIENT
from tokenyard.scripts import RESCUE_HELD, RESCUE_NOT_LEADER, Scripts

log = logging.getLogger("tokenyard.coordinator.rescuer")

BATCH = 100


class Rescuer:
    """Moves the lanes of lost workers back to the intake, a bounded batch in a turn."""

    def __init__(
        self,
        connection: redis.Redis,
        scripts: Scripts,
        keys: Keys,
        on_moved: Callable[[str, int], None] = lambda *_: None,
        slots_of: Callable[[str], int] = lambda _: sys.maxsize,
    ) -> None:
        """``on_moved`` is told of whom how many requests were taken back.

        ``slots_of`` says how many requests a worker's engine runs at once.
        """
        self._on_moved = on_moved
        self._slots_of = slots_of
        self._inquests: dict[str, CrashAnalysis] = {}  # of lanes that take several turns
        self._connection = connection
        self._scripts = scripts
        self._keys = keys

    def run_once(self, token: str, lost: list[str]) -> int:
        """One batch from each lost worker; how many entries remain.

        Returns `RESCUE_NOT_LEADER` where the caller was deposed.
        """
        remaining = 0
        for worker in lost:
            left = self._rescue(token, worker)
            if left == RESCUE_NOT_LEADER:
                return left
            remaining += max(0, left)
        return remaining

    def _rescue(self, token: str, worker: str) -> int:
        began = time.monotonic()
        held = self._scripts.rescue(token, worker)
        if held in (RESCUE_NOT_LEADER, RESCUE_HELD, 0):
            return held
        entries: Any = self._connection.xrange(self._keys.lane(worker), count=BATCH)
        batch = [(entry.decode(), *_address(fields)) for entry, fields in entries]
        trials = self._inquest(worker).trials([entry for entry, _, _ in batch])
        left = self._scripts.rescue(token, worker, batch, trials)
        if left <= 0:
            self._inquests.pop(worker, None)
        if left != RESCUE_NOT_LEADER:
            self._on_moved(worker, sum(b"attempt" in fields for _, fields in entries))
        took_ms = (time.monotonic() - began) * 1000
        log.warning("rescued %d of %s, %d left, %.0f ms", len(batch), worker, left, took_ms)
        return left

    def _inquest(self, worker: str) -> CrashAnalysis:
        """Who is suspect if this worker has crashed; the script knows whether it has."""
        if worker not in self._inquests:
            pipeline = self._connection.pipeline(transaction=False)
            pipeline.hget(self._keys.quarantine, worker)
            pipeline.xlen(self._keys.lane(worker))
            mark, length = pipeline.execute()
            slots = self._slots_of(worker)
            self._inquests[worker] = CrashAnalysis(read_mark(mark), length=length, slots=slots)
        return self._inquests[worker]


def _address(fields: Mapping[bytes, bytes]) -> tuple[str, str]:
    """Client and id of the request in a lane entry."""
    with contextlib.suppress(InvalidRequest):
        fields = unfold(fields)
    client = fields.get(b"client", b"").decode(errors="replace") or DEFAULT_CLIENT
    return client, fields.get(b"id", b"").decode(errors="replace")
