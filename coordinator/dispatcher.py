"""From the intake onto the lanes: read, judge, place, hand over, one batch in a turn."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence

from coordinator.intake import Entry, Event, Intake, Waiting
from coordinator.judge import Judge
from coordinator.plan import Placed, Plan, Planner
from coordinator.rate import Rate
from coordinator.refusals import late
from coordinator.roster import Roster
from coordinator.selection import Selection
from tokenyard.keys import IntakeClass
from tokenyard.replies import refusal
from tokenyard.scripts import Answered, Dispatched, Move, Scripts
from tokenyard.wire import Refused, Request, Unanswerable

log = logging.getLogger("tokenyard.coordinator.dispatcher")


class Deposed(Exception):
    """Another coordinator leads."""


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
        self._patience_ms = 0
        self._defers = False
        self.rate = Rate()

    def run_once(self, token: str, *, may_place: bool, block_ms: int) -> None:
        """One turn: read, then place, so that what is placed is the first of all that waits.

        It waits for something to read unless there is more to place. Raises `Deposed` where the
        yard has another leader.
        """
        room = self._room() if may_place else 0
        entries, events = self._intake.read(room, min(block_ms, self._patience_ms))
        self._heed(events)
        self.take_in(token, entries)
        self._patience_ms = block_ms
        # What came with the news that the roster has changed is placed by the new one; at the
        # second such turn in a row by the one at hand, for there may be news all the time.
        self._defers = may_place and self._roster.is_stale and not self._defers
        if may_place and not self._defers:
            self._act_on(token, self._make_plan())
        if self._roster.is_stale:
            self._patience_ms = 0

    def _act_on(self, token: str, plan: Plan) -> None:
        """Carry a plan out, and see how long the next turn may wait for something to read."""
        for waiting in plan.late:
            self.refuse(token, waiting, late(waiting.request, "waiting in the intake"))
        moved = self._hand_over(token, plan.placed)
        self.rate.note(busy=self._intake.holds_any)
        if moved and self._intake.holds_any:
            self._patience_ms = 0
        elif plan.next_ms is not None:
            left_ms = plan.next_ms - self._roster.server_ms()
            self._patience_ms = max(1, min(self._patience_ms, math.ceil(left_ms)))

    def take_in(self, token: str, entries: Iterable[Entry]) -> None:
        """Judge entries: hold the valid, answer the invalid, bury what cannot be answered."""
        for entry in entries:
            self._patience_ms = 0  # there may be something to place
            verdict = self._judge.judge(entry.intake, entry.fields)
            match verdict:
                case Request():
                    self._intake.hold(self._waiting(entry, verdict))
                case Refused():
                    self.answer(token, entry, verdict)
                case Unanswerable(reason):
                    log.warning("buried entry %s of %s: %s", entry.id, entry.intake, reason)
                    buried = self._scripts.bury(token, entry.intake, entry.id, reason)
                    _expect_leader(buried is not Answered.NOT_LEADER)

    def _waiting(self, entry: Entry, request: Request) -> Waiting:
        history = self._judge.history(entry.intake, entry.fields)
        published = entry.fields.get(b"published", b"") if entry.intake == "retry" else b""
        suspect = self._judge.is_suspect(history)
        return Waiting(entry.intake, entry.id, request, history, suspect, published)

    def answer(self, token: str, entry: Entry, refused: Refused) -> None:
        """Give an entry its result without running it."""
        published = entry.fields.get(b"published", b"") if entry.intake == "retry" else b""
        self._answer(token, entry.intake, entry.id, refused, published)

    def refuse(self, token: str, waiting: Waiting, refused: Refused) -> None:
        """Give a request that is held its result without running it."""
        self._intake.held[waiting.intake].remove(waiting)
        self._answer(token, waiting.intake, waiting.entry, refused, waiting.published)
        self._selection.settle(waiting, None)

    def _answer(
        self, token: str, intake: IntakeClass, entry: str, refused: Refused, published: bytes
    ) -> None:
        log.info("refused %s/%s: %s", refused.client, refused.id, refused.message)
        reply = refusal(refused, refused.code, refused.message, published=published)
        reason = f"{refused.code}: {refused.message}" if refused.is_dead else ""
        answered = self._scripts.answer(token, intake, entry, refused, reply, dead=reason)
        _expect_leader(answered is not Answered.NOT_LEADER)

    def _room(self) -> int:
        """How many requests could be placed now, at most a batch."""
        return min(sum(lane.room for lane in self._roster.lanes()), self._max_batch)

    def _heed(self, events: Iterable[Event]) -> None:
        """Places became free, or the roster changed and must be read again."""
        for event in events:
            count = event.fields.get(b"count", b"")
            if event.fields.get(b"event") == b"freed" and count.isdigit() and len(count) < 10:
                worker = event.fields.get(b"worker", b"").decode(errors="replace")
                self._roster.free(worker, int(count), event.id)
            else:
                self._roster.mark_stale()

    def _make_plan(self) -> Plan:
        """Choose lanes for what is held, in order; nothing is changed yet."""
        planner = Planner(
            self._roster.lanes(),
            model_of=lambda waiting: self._judge.model_of(waiting.request),
            choose=self._selection.choose,
            now_ms=self._roster.server_ms(),
            most=self._max_batch,
            strict_order=self._selection.strict_order,
        )
        plan = planner.make(self._intake.in_order(self._turn))
        # Only turns that place something count: of others there may be one after each of these,
        # and the fair turn would always fall on them.
        self._turn += bool(plan.placed)
        return plan

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
                alone=item.alone,
                why=self._selection.why(item.lane, alone=item.alone),
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
                self._roster.add_load(item.lane.worker, alone=item.alone)
                self.rate.count(1)
            self._selection.settle(item.waiting, item.lane if dispatched else None)


def _expect_leader(leads: bool) -> None:
    if not leads:
        raise Deposed
