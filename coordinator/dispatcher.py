"""From the intake onto the lanes: read, judge, place, hand over, one batch in a turn."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from coordinator.intake import Entry, Event, Intake, Waiting
from coordinator.judge import Judge
from coordinator.policies import Lane
from coordinator.roster import Roster
from coordinator.selection import Selection
from tokenyard.replies import refusal
from tokenyard.scripts import Answered, Dispatched, Move, Scripts
from tokenyard.wire import Refused, Request, Unanswerable

log = logging.getLogger("tokenyard.coordinator.dispatcher")


class Deposed(Exception):
    """Another coordinator leads."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A request and the lane chosen for it."""

    waiting: Waiting
    lane: Lane


class Dispatcher:
    """Assigns waiting requests to workers with free capacity."""

    def __init__(
        self,
        scripts: Scripts,
        intake: Intake,
        roster: Roster,
        judge: Judge,
        selection: Selection,
        *,
        max_batch: int,
    ) -> None:
        self._scripts = scripts
        self._intake = intake
        self._roster = roster
        self._judge = judge
        self._selection = selection
        self._max_batch = max_batch
        self._turn = 0
        self._more_to_place = False

    def run_once(self, token: str, *, may_place: bool, block_ms: int) -> None:
        """One turn: read, then place, so that what is placed is the first of all that waits.

        It waits for something to read unless there is more to place. Raises `Deposed` where the
        yard has another leader.
        """
        room = self._room() if may_place else 0
        entries, events = self._intake.read(room, 0 if self._more_to_place else block_ms)
        self._heed(events)
        self.take_in(token, entries)
        # What came with the news that the roster has changed is placed by the new one.
        may_place = may_place and not self._roster.is_stale
        moved = may_place and self._hand_over(token, self._place())
        self._more_to_place = self._roster.is_stale or (moved and self._intake.holds_any)

    def take_in(self, token: str, entries: Iterable[Entry]) -> None:
        """Judge entries: hold the valid, answer the invalid, bury what cannot be answered."""
        for entry in entries:
            verdict = self._judge.judge(entry.intake, entry.fields)
            match verdict:
                case Request():
                    self._intake.hold(Waiting(entry.intake, entry.id, verdict))
                case Refused():
                    log.info("refused %s/%s: %s", verdict.client, verdict.id, verdict.message)
                    self._answer(token, entry, verdict)
                case Unanswerable(reason):
                    log.warning("buried entry %s of %s: %s", entry.id, entry.intake, reason)
                    buried = self._scripts.bury(token, entry.intake, entry.id, reason)
                    _expect_leader(buried is not Answered.NOT_LEADER)

    def _answer(self, token: str, entry: Entry, refused: Refused) -> None:
        published = entry.fields.get(b"published", b"") if entry.intake == "retry" else b""
        reply = refusal(refused, refused.code, refused.message, published=published)
        answered = self._scripts.answer(token, entry.intake, entry.id, refused, reply)
        _expect_leader(answered is not Answered.NOT_LEADER)

    def _room(self) -> int:
        """How many requests could be placed now, at most a batch."""
        free = sum(max(0, lane.limit - lane.load) for lane in self._roster.lanes())
        return min(free, self._max_batch)

    def _heed(self, events: Iterable[Event]) -> None:
        """Places became free, or the roster changed and must be read again."""
        for event in events:
            count = event.fields.get(b"count", b"")
            if event.fields.get(b"event") == b"freed" and count.isdigit() and len(count) < 10:
                worker = event.fields.get(b"worker", b"").decode(errors="replace")
                self._roster.free(worker, int(count), event.id)
            else:
                self._roster.mark_stale()

    def _place(self) -> list[Placed]:
        """Choose lanes for what is held, in order; nothing is changed yet."""
        by_model = _by_model(self._roster.lanes())
        placed: list[Placed] = []
        shut: set[str] = set()  # models that have no room in this turn
        for waiting in self._intake.in_order(self._turn):
            if len(placed) >= self._max_batch or not by_model:
                break
            model = self._judge.model_of(waiting.request)
            if model in shut:
                continue
            lanes = by_model.get(model)
            lane = self._selection.choose(waiting, lanes) if lanes else None
            if lanes is None or lane is None:
                shut.add(model)
                if self._selection.strict_order:
                    break
                continue
            lanes[lanes.index(lane)] = replace(lane, load=lane.load + 1)
            placed.append(Placed(waiting, lane))
        # Only turns that place something count: of others there may be one after each of these,
        # and the fair turn would always fall on them.
        self._turn += bool(placed)
        return placed

    def _hand_over(self, token: str, placed: Sequence[Placed]) -> bool:
        """Carry the choices out; whether there were any."""
        if not placed:
            return False
        moves = [
            Move(
                item.waiting.intake,
                item.waiting.entry,
                item.waiting.request.client,
                item.waiting.request.id,
                item.lane.worker,
                item.lane.limit,
            )
            for item in placed
        ]
        began = time.perf_counter()
        codes = self._scripts.dispatch(token, moves)
        log.debug("dispatched %d in %.1f ms", len(moves), (time.perf_counter() - began) * 1e3)
        self._settle(placed, codes)
        return True

    def _settle(self, placed: Sequence[Placed], codes: Sequence[Dispatched]) -> None:
        _expect_leader(Dispatched.NOT_LEADER not in codes)
        stay = (Dispatched.CLOSED, Dispatched.FULL)
        for item, code in zip(placed, codes, strict=True):
            if code in stay:
                self._roster.mark_stale()
                continue
            self._intake.held[item.waiting.intake].remove(item.waiting)
            dispatched = code is Dispatched.DISPATCHED
            if dispatched:
                self._roster.add_load(item.lane.worker)
            self._selection.settle(item.waiting, item.lane if dispatched else None)


def _by_model(lanes: Iterable[Lane]) -> dict[str, list[Lane]]:
    grouped: dict[str, list[Lane]] = {}
    for lane in lanes:
        grouped.setdefault(lane.model, []).append(lane)
    return grouped


def _expect_leader(leads: bool) -> None:
    if not leads:
        raise Deposed
