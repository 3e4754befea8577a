"""Takes back what workers without a lease hold."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

from coordinator.roster import Roster
from coordinator.routing.suspicion import CrashAnalysis, read_mark
from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.broker.direct import ask_all
from tokenyard.protocol.parse import parse_owner
from tokenyard.protocol.wire import DEFAULT_CLIENT
from tokenyard.scripts import Scripts
from tokenyard.scripts.leader import RESCUE_HELD

log = logging.getLogger("tokenyard.coordinator.rescuer")

BATCH: Final = 100
#: After a (re)connection, leases that have run out are left alone for so long: their owners may
#: have been cut off by the same failure and are about to renew.
GRACE_S: Final = 3.0
#: A server that was silent for so long counts as a connection that broke, too.
SILENCE_S: Final = 2.0
#: Client and id of no request.
NOBODY: Final = (DEFAULT_CLIENT, "")


class Rescuer:
    """Moves the lanes of lost workers back to the intake, a bounded batch in a turn."""

    def __init__(self, scripts: Scripts, roster: Roster, counts: CoordinatorCounts) -> None:
        self._yard = scripts.yard
        self._scripts = scripts
        self._roster = roster
        self._counts = counts
        self._analyses: dict[str, CrashAnalysis] = {}  # of lanes that take several turns
        self._contact_at = -math.inf  # monotonic; when the server answered last
        self._grace_until = 0.0
        #: Whether entries remain that the next turn should move without waiting.
        self.has_more = False

    def note_contact(self) -> None:
        """The server has answered; to be called in each turn, also by a standby.

        A standby that was in contact all along need not wait before it takes back what the workers
        of a vanished host held, however often the lead changes.
        """
        now = clock.monotonic()
        if now - self._contact_at > SILENCE_S:
            self._grace_until = now + GRACE_S
        self._contact_at = now

    def note_disconnected(self) -> None:
        """The connection broke."""
        self._contact_at = -math.inf

    def run_once(self, token: str) -> None:
        """Move one batch from each lost worker."""
        lost = self._lost()
        left = sum([max(0, self._rescue(token, worker)) for worker in lost])
        self.has_more = left > 0
        if lost and not left:
            self._roster.mark_stale()

    def _lost(self) -> Sequence[str]:
        """Workers without a lease; in the time of grace only those that have given it up."""
        lost, members = self._roster.lost, self._roster.members
        if clock.monotonic() < self._grace_until:
            return [w for w in lost if w not in members or members[w].lease_ms <= 0]
        return lost

    def _rescue(self, token: str, worker: str) -> int:
        """How many entries the worker's lane has left."""
        began = clock.monotonic()
        state = self._scripts.rescue(token, worker)
        if state in (RESCUE_HELD, 0):
            return state
        entries: Any = self._yard.connection.xrange(self._yard.keys.lane(worker), count=BATCH)
        # One that names nobody, such as a cancellation, is only taken off the lane.
        batch = [(entry.decode(), *(parse_owner(fields) or NOBODY)) for entry, fields in entries]
        trials = self._analysis(worker).trials([entry for entry, _, _ in batch])
        member = self._roster.members.get(worker)
        base_model = member.info.model if member else ""
        left = self._scripts.rescue(token, worker, batch, trials, base_model=base_model)
        if left <= 0:
            self._analyses.pop(worker, None)
        count = sum(b"attempt" in fields for _, fields in entries)
        self._counts.took_back(member.lease_ms if member else 0, count)
        took_ms = (clock.monotonic() - began) * 1000
        log.warning("rescued %d of %s, %d left, %.0f ms", len(batch), worker, left, took_ms)
        return left

    def _analysis(self, worker: str) -> CrashAnalysis:
        """Which requests are suspects if this worker crashed; the script knows whether it did."""
        if worker not in self._analyses:
            keys = self._yard.keys
            ask = [("HGET", keys.quarantine, worker), ("XLEN", keys.lane(worker))]
            mark, length = ask_all(self._yard.connection, ask)
            member = self._roster.members.get(worker)
            most = member.info.max_num_seqs if member else sys.maxsize
            self._analyses[worker] = CrashAnalysis(
                read_mark(mark), length=length, max_num_seqs=most
            )
        return self._analyses[worker]
