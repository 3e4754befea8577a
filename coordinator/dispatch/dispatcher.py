"""From the intake onto the lanes: read, judge, place, hand over, one batch in a turn."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from coordinator.counts import CoordinatorCounts
from coordinator.dispatch import refusals
from coordinator.dispatch.demand import Demand
from coordinator.dispatch.intake import Entry, Intake, WakeupEvent
from coordinator.dispatch.plan import PlannedDispatch, make_plan
from coordinator.dispatch.rate import ServiceRate
from coordinator.dispatch.spans import QueueSpans
from coordinator.dispatch.validator import RequestValidator
from coordinator.history import FRESH
from coordinator.roster import Roster
from coordinator.routing.lanes import Lanes
from coordinator.routing.queued_request import QueuedRequest, prompt_tokens
from coordinator.routing.selection import Selection
from tokenyard.protocol.digest import entry_digest
from tokenyard.protocol.errors import Code, reused
from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.replies import refusal
from tokenyard.protocol.streams import position
from tokenyard.protocol.wire import Refused, Request, Unanswerable
from tokenyard.scripts import Answered, Dispatched, Move, Scripts
from tokenyard.telemetry.tracing import Tracer

log = logging.getLogger("tokenyard.coordinator.dispatcher")

#: Places that became free are heard of so often where no request waits for one: their stream is
#: bounded, and loads that only grow would close the lanes.
HEAR_EVERY_S = 0.1
_DISPATCHED: Final = Dispatched.DISPATCHED  # an enumeration takes its time to say it


class LostLeadership(Exception):
    """Another coordinator leads."""


class Dispatcher:
    """Assigns waiting requests to workers with free capacity."""

    def __init__(
        self,
        scripts: Scripts,
        intake: Intake,
        roster: Roster,
        judge: RequestValidator,
        selection: Selection,
        *,
        max_batch: int,
        max_trial_share: float = 0.5,
        counts: CoordinatorCounts | None = None,
        spans: QueueSpans | None = None,
    ) -> None:
        self._counts = counts or CoordinatorCounts()
        self._spans = spans or QueueSpans(Tracer("", ""), "")
        self._scripts = scripts
        self._intake = intake
        self._backlog = intake.backlog
        self._roster = roster
        self._judge = judge
        self._selection = selection
        self._max_batch = max_batch
        self._trial_share = max_trial_share
        self._first = ""  # the model that was served first in the last turn
        self._patience_ms = 0
        self._defers = False
        self._has_missed = False  # an entry that it held was gone
        self._hears_at = 0.0  # monotonic; of places, though nobody waits for one
        self.rate = ServiceRate()

    def run_once(self, token: str, *, may_place: bool, block_ms: int) -> None:
        """One turn: read, then place, so that what is placed is the first of all that waits.

        It waits for something to read unless there is more to do. Raises `LostLeadership` where the
        yard has another leader.
        """
        room = self._room() if may_place else 0
        patience_ms = min(block_ms, self._patience_ms)
        entries, events = self._intake.read(room, patience_ms, places=self._hears_places())
        self._handle_signal(events)
        self.take_in(token, entries)
        self._drop_gone()
        self._patience_ms = block_ms
        # What came with the news that the roster has changed is placed by the new one; at the
        # second such turn in a row by the one at hand, for there may be news all the time.
        self._defers = may_place and self._roster.is_stale and not self._defers
        if may_place and not self._defers:
            self._place(token)
        if self._roster.is_stale or self._intake.is_auditing:
            self._patience_ms = 0

    def _hears_places(self) -> bool:
        """Whether places that become free are heard of in this turn.

        Where nothing waits for one, and the policy does not look at loads, a turn for each result
        would only take time from the processes that the result is on its way to.
        """
        now = time.monotonic()
        if not len(self._backlog) and self._selection.is_blind and now < self._hears_at:
            return False
        self._hears_at = now + HEAR_EVERY_S
        return True

    def _place(self, token: str) -> None:
        """Answer what is late, hand over what has a lane, and see how long the next may wait."""
        self._backlog.advance(self._roster.server_ms())
        for queued in self._backlog.late(self._max_batch):
            where = "waiting in the intake"
            self.refuse(token, queued, refusals.late(queued.request, where))
        moved = self._hand_over(token, self._make_plan())
        is_busy = any(model in self._backlog.models for model in self._roster.lanes)
        self.rate.note(busy=is_busy)
        if self._backlog.late(1) or (moved and is_busy):
            self._patience_ms = 0
        elif self._backlog.next_ms is not None:
            left_ms = self._backlog.next_ms - self._roster.server_ms()
            self._patience_ms = max(1, min(self._patience_ms, math.ceil(left_ms)))

    def demands(self) -> list[Demand]:
        """What waits and could run if its model had a worker; of what pauses, nothing counts."""
        return self._backlog.demands(self._roster.server_ms())

    def has_suspects(self, model: str) -> bool:
        """Whether suspects wait for a trial on that model."""
        queue = self._backlog.queue(model)
        return queue is not None and next(queue.suspects, None) is not None

    def fail_model(self, token: str, model: str, reason: str) -> None:
        """Answer requests for a model that cannot be had, at most a batch in a turn."""
        queue = self._backlog.queue(model)
        for queued in list(islice(queue or (), self._max_batch)):
            message = f"model: {model}: {reason}"
            refused = refusals.refuse(queued.request, Code.MODEL_UNAVAILABLE, message)
            self.refuse(token, queued, refused)
        if model in self._backlog.models:
            self._patience_ms = 0

    def take_in(self, token: str, entries: Iterable[Entry]) -> None:
        """Judge entries: hold the valid, answer the invalid, bury what cannot be answered."""
        now_ms = self._roster.server_ms()
        for entry in entries:
            verdict = self._judge.judge(entry.intake, entry.fields)
            match verdict:
                case Request():
                    self._backlog.add(self._waiting(entry, verdict, now_ms))
                case Refused():
                    self.answer(token, entry, verdict)
                case Unanswerable(reason):
                    log.warning("buried entry %s of %s: %s", entry.id, entry.intake, reason)
                    if self._bury(token, entry.intake, entry.id, reason):
                        self._counts.buried()

    def _bury(self, token: str, intake: IntakeClass, entry: str, reason: str) -> bool:
        """Put an entry among the dead letters; False where it was gone."""
        buried = self._scripts.bury(token, intake, entry, reason)
        _expect_leader(buried is not Answered.NOT_LEADER)
        return buried is Answered.DONE

    def _waiting(self, entry: Entry, request: Request, now_ms: float) -> QueuedRequest:
        is_retry = entry.intake == "retry"  # any other has been through nothing
        history = self._judge.history(entry.intake, entry.fields) if is_retry else FRESH
        # Clients may choose the ids of entries; nothing has waited for less than no time.
        since_ms = min(float(position(entry.id)[0]), now_ms)
        return QueuedRequest(
            intake=entry.intake,
            entry=entry.id,
            id=request.id,
            client=sys.intern(request.client),
            reply_to=sys.intern(request.reply_to),
            result_ttl_s=request.result_ttl_s,
            deadline_ms=request.deadline_ms,
            model=self._judge.model_of(request),
            tokens=prompt_tokens(request, entry.fields),
            since_ms=since_ms,
            history=history,
            trial=self._judge.trial_size(history) if is_retry else None,
            published=_published(entry) if is_retry else b"",
            trace=self._spans.trace_of(request),
            features=self._selection.features(request, entry.fields),
            digest=_digest(entry),
        )

    def answer(self, token: str, entry: Entry, refused: Refused) -> None:
        """Give an entry its result without running it; it may be held or not."""
        queued = self._backlog.get(entry.intake, entry.id)
        if queued:
            self._drop(queued)
            self._spans.ended(queued, self._roster.server_ms(), error=str(refused.code))
        model = queued.model if queued else ""
        self._answer(
            token, entry.intake, entry.id, refused, _published(entry), model, _digest(entry)
        )

    def refuse(self, token: str, queued: QueuedRequest, refused: Refused) -> None:
        """Give a request that is held its result without running it."""
        self._drop(queued)
        self._spans.ended(queued, self._roster.server_ms(), error=str(refused.code))
        entry, published = queued.entry, queued.published
        self._answer(token, queued.intake, entry, refused, published, queued.model, queued.digest)

    def take_missed(self) -> bool:
        """Whether an entry was gone since this was asked; see `LedgerReconciler`."""
        has_missed, self._has_missed = self._has_missed, False
        return has_missed

    def _drop(self, queued: QueuedRequest) -> None:
        """Hold a request no more that was not given to a worker."""
        self._backlog.remove(queued)
        self._selection.settle(queued, None)

    def _drop_gone(self) -> None:
        for queued in self._intake.gone():
            self._drop(queued)

    def _answer(
        self,
        token: str,
        intake: IntakeClass,
        entry: str,
        refused: Refused,
        published: bytes,
        model: str,
        digest: str,
    ) -> None:
        log.info("refused %s/%s: %s", refused.client, refused.id, refused.message)
        reply = refusal(refused, refused.code, refused.message, published=published)
        reason = f"{refused.code}: {refused.message}" if refused.is_dead else ""
        answered = self._scripts.answer(
            token, intake, entry, refused, reply, dead=reason, digest=digest
        )
        _expect_leader(answered is not Answered.NOT_LEADER)
        if answered is Answered.DONE:
            self._counts.answered(model, intake, refused.code, is_dead=refused.is_dead)
        elif answered is Answered.REUSED:
            self._note_reused(intake, entry, refused.id)

    def _note_reused(self, intake: IntakeClass, entry: str, request_id: str) -> None:
        """An entry has become a dead letter, since its id is known with another request."""
        log.warning("buried entry %s of %s: %s", entry, intake, reused(request_id))
        self._counts.buried(Code.ID_REUSED)

    def _room(self) -> int:
        """How many requests could be placed now, at most a batch."""
        return min(sum(lanes.room for lanes in self._roster.lanes.values()), self._max_batch)

    def _handle_signal(self, events: Iterable[WakeupEvent]) -> None:
        """Places became free, or the roster changed and must be read again."""
        for event in events:
            count = event.fields.get(b"count", b"")
            if event.fields.get(b"event") == b"capacity" and count.isdigit() and len(count) < 10:
                worker = event.fields.get(b"worker", b"").decode(errors="replace")
                work = event.fields.get(b"work", b"")
                weight = int(work) if work.isdigit() and len(work) < 16 else None
                self._roster.free(worker, int(count), event.id, work=weight)
            elif event.fields.get(b"event") != b"inbox":
                self._roster.mark_stale()

    def _make_plan(self) -> list[PlannedDispatch]:
        """Choose lanes for what is held, at most a batch; nothing is changed yet."""
        placed: list[PlannedDispatch] = []
        for model, lanes in self._open_models():
            queue = self._backlog.queue(model)
            if queue is None or len(placed) >= self._max_batch:
                continue
            chosen = make_plan(
                queue.suspects,
                queue.others,
                lanes,
                choose=self._selection.choose,
                most=self._max_batch - len(placed),
                trial_share=self._trial_share,
            )
            placed += chosen
        return placed

    def _open_models(self) -> Iterator[tuple[str, Lanes]]:
        """The lanes of each model that has room; the models take turns in being the first.

        Else those before would take the whole batch, turn for turn.
        """
        by_model = self._roster.lanes
        names = sorted(model for model, lanes in by_model.items() if lanes.room)
        names.sort(key=lambda name: name <= self._first)
        self._first = names[0] if names else ""
        for name in names:
            yield name, by_model[name]

    def _hand_over(self, token: str, placed: Sequence[PlannedDispatch]) -> bool:
        """Carry the choices out; whether there were any."""
        if not placed:
            return False
        moves = [
            Move(
                item.queued.intake,
                item.queued.entry,
                item.queued.client,
                item.queued.id,
                item.lane.worker,
                item.lane.limit,
                alone=item.alone,
                why=item.why,
                digest=item.queued.digest,
                on_trial=item.on_trial,
            )
            for item in placed
        ]
        began = time.perf_counter()
        codes = self._scripts.dispatch(token, moves)
        took_s = time.perf_counter() - began
        self._counts.assign.observe(took_s)
        log.debug("dispatched %d in %.1f ms", len(moves), took_s * 1e3)
        self._settle(token, placed, codes)
        return True

    def _settle(
        self, token: str, placed: Sequence[PlannedDispatch], codes: Sequence[Dispatched]
    ) -> None:
        _expect_leader(Dispatched.NOT_LEADER not in codes)
        stay = (Dispatched.CLOSED, Dispatched.FULL)
        given: dict[str, list[PlannedDispatch]] = {}
        for item, code in zip(placed, codes, strict=True):
            queued = item.queued
            if code is _DISPATCHED:
                self._backlog.remove(queued, is_served=True)
                given.setdefault(item.lane.worker, []).append(item)
                self._selection.settle(queued, item.lane)
                continue
            if code in stay:
                self._roster.mark_stale()
                continue
            self._drop(queued)
            self._has_missed = self._has_missed or code is Dispatched.GONE
            is_reused = code is Dispatched.REUSED
            if is_reused and self._bury(token, queued.intake, queued.entry, reused(queued.id)):
                self._note_reused(queued.intake, queued.entry, queued.id)
        for worker, items in given.items():
            self._note_given(worker, items)

    def _note_given(self, worker: str, items: Sequence[PlannedDispatch]) -> None:
        """These have come onto the lane of ``worker``."""
        work = sum([item.queued.features.work for item in items])
        tried = any(item.alone or item.on_trial for item in items)
        self._roster.add_load(worker, len(items), work=work, tried=tried)
        self.rate.count(len(items))
        now_ms = self._roster.server_ms()
        for item in items:
            queued = item.queued
            waited_s = max(0.0, now_ms - queued.since_ms) / 1000
            self._counts.queue_wait[queued.intake].observe(waited_s)
            if item.match is not None:
                self._counts.prefix_match.observe(item.match)
            self._spans.ended(queued, now_ms, worker=worker)


def _digest(entry: Entry) -> str:
    """What its request is told from another by; a retry has been in the ledger before."""
    return entry_digest(entry.fields) if entry.intake != "retry" else ""


def _expect_leader(leads: bool) -> None:
    if not leads:
        raise LostLeadership


def _published(entry: Entry) -> bytes:
    """Tokens that the readers of a retry have seen, packed."""
    return entry.fields.get(b"published", b"") if entry.intake == "retry" else b""
