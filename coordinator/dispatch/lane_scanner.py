"""Reads the entries on the lanes: how many tokens of work, and which prompts.

After a takeover it reads all lanes, a few in a turn; then one lane each time that the roster is
read, so that errors of counting do not last. Only policies that need it pay for it.
"""

from __future__ import annotations

from typing import Any, Final

from coordinator.roster import Roster
from coordinator.routing.selection import Selection
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import Request

#: Lanes that are read in one turn after a takeover.
MOST_AT_ONCE: Final = 32


class LaneScanner:
    """Gives the roster and the selection what an earlier leader knew."""

    def __init__(self, yard: Yard, roster: Roster, selection: Selection) -> None:
        self._yard = yard
        self._roster = roster
        self._selection = selection
        self._known: dict[str, None] = {}  # workers, the longest ago read first

    def begin(self) -> None:
        """A new term: forget what was known in an earlier one."""
        self._known.clear()

    def run_once(self) -> None:
        """Read unknown lanes, or else the one that was read longest ago."""
        if not self._selection.is_weighing and not self._selection.is_affine:
            return
        serving = [worker for worker, member in self._roster.members.items() if member.serves]
        self._known = {worker: None for worker in self._known if worker in serving}
        unknown = [worker for worker in serving if worker not in self._known]
        for worker in unknown[:MOST_AT_ONCE] or list(self._known)[:1]:
            self._read(worker, is_new=worker not in self._known)
            self._known.pop(worker, None)
            self._known[worker] = None
        if len(unknown) > MOST_AT_ONCE:
            self._roster.mark_stale()

    def _read(self, worker: str, *, is_new: bool) -> None:
        # The last event first, as for the loads: what leaves in between is counted twice, not
        # missed.
        pipeline = self._yard.connection.pipeline(transaction=False)
        pipeline.xrevrange(self._yard.keys.capacity, count=1)
        pipeline.xrange(self._yard.keys.lane(worker))
        last, entries = pipeline.execute()
        work = sum(self._weigh(worker, fields, is_new=is_new) for _, fields in entries)
        self._roster.weigh(worker, work, last[0][0].decode() if last else "0-0")

    def _weigh(self, worker: str, fields: Any, *, is_new: bool) -> int:
        request = parse_request(fields)
        if not isinstance(request, Request):  # a cancellation, for example
            return 0
        features = self._selection.features_of(request, fields)
        if is_new:
            self._selection.note(worker, features)
        return features.work
