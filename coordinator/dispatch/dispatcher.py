"""From the intake onto the lanes: read, admit, plan, dispatch, one batch in a turn."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, cast

from coordinator.dispatch.admission import Admission, refuse, refuse_late, refuse_quota
from coordinator.dispatch.entries import Entry, Fields
from coordinator.dispatch.intake import Intake
from coordinator.dispatch.plan import PlannedDispatch, make_plan
from coordinator.dispatch.waits import QueueSpans, ServiceRate, WaitReasons
from coordinator.placement.needs import Demand
from coordinator.roster import Roster
from coordinator.routing.lanes import Lanes
from coordinator.routing.queued_request import QueuedRequest
from coordinator.routing.selection import Selection
from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.protocol.errors import Code, reused
from tokenyard.protocol.keys import PriorityClass, class_of
from tokenyard.protocol.replies import refusal
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.streams import digits
from tokenyard.protocol.wire import Refused, Unanswerable
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Answered, Dispatched, Move, Transfer, Transferred

log = logging.getLogger("tokenyard.coordinator.dispatcher")

#: While no request waits, events of lanes with room are read only so often: their stream is
#: bounded, and loads that only grow would close the lanes.
READ_CAPACITY_EVERY_S = 0.1
#: Tenants of which one turn counts what waits.
MOST_RECOUNTED: Final = 8
_DISPATCHED: Final = Dispatched.DISPATCHED  # enum attribute access is slow; bound once


class Dispatcher:
    """Assigns queued requests to workers with room."""

    def __init__(
        self,
        scripts: Scripts,
        intake: Intake,
        roster: Roster,
        admission: Admission,
        selection: Selection,
        settings: CoordinatorSettings,
        *,
        counts: CoordinatorCounts,
        spans: QueueSpans,
    ) -> None:
        self._scripts = scripts
        self._intake = intake
        self._backlog = intake.backlog
        self._roster = roster
        self._admission = admission
        self._selection = selection
        self._max_batch = settings.max_batch
        self._trial_share = settings.max_trial_share
        self._counts = counts
        self._spans = spans
        self._first = ""  # the model that was served first in the last turn
        self._patience_ms = 0
        self._defers = False
        #: Whether an entry of the backlog was gone in the last turn; see `LedgerReconciler`.
        self.has_missed = False
        self._reads_capacity_at = 0.0  # monotonic; also while nothing waits
        self.rate = ServiceRate()
        self._waits = WaitReasons()

    def run_once(self, token: str, *, may_place: bool, block_ms: int) -> None:
        """One turn: read, then place, so that what is placed is the first of all that waits.

        It waits for something to read unless there is more to do.
        """
        self.has_missed = False
        self._waits.begin(self._roster.broker_time.now_ms)
        room = self._room() if may_place else 0
        patience_ms = min(block_ms, self._patience_ms)
        entries, events = self._intake.read(room, patience_ms, with_capacity=self._reads_capacity())
        self._handle_events(events)
        self.take_in(token, entries)
        self._read_tenants(token)
        for queued in self._intake.gone():
            self._drop(queued)
        self._patience_ms = block_ms
        # Requests that came with the news of a changed roster are placed by the new one; in the
        # second such turn in a row by the one at hand, since the roster may change all the time.
        self._defers = may_place and self._roster.is_stale and not self._defers
        if may_place and not self._defers:
            self._place(token)
        self._note_waits(may_place=may_place)
        if self._roster.is_stale or self._intake.is_auditing:
            self._patience_ms = 0

    def _note_waits(self, *, may_place: bool) -> None:
        """Note why requests have to wait that are not placed in this turn."""
        reasons = dict.fromkeys(self._backlog.models, "not all expected workers had joined")
        for model in reasons if may_place else ():
            lanes = self._roster.lanes.get(model)
            reasons[model] = "its turn had not come" if lanes else self._roster.why_closed(model)
            if lanes and not lanes.room:
                reasons[model] = "all places of its workers were taken"
        self._waits.note(reasons, self._roster.broker_time.now_ms)

    def _read_tenants(self, token: str) -> None:
        """Queue what those next in line have waiting, and let the common intakes stand in line."""
        tenants = self._intake.tenants
        if not tenants.is_in_use:
            return
        self.take_in(token, tenants.read())
        wrong = tenants.missing[:MOST_RECOUNTED]
        if tenants.is_common_wrong():
            wrong.append("")
        for tenant in wrong:
            self._scripts.recount(token, tenant)
        if "" in wrong:
            tenants.read_line()

    def _reads_capacity(self) -> bool:
        """Whether this turn reads the events of lanes with room.

        Where no request waits and the policy ignores loads, a turn for each result would only take
        time from the processes that the result is on its way to.
        """
        now = clock.monotonic()
        is_idle = not len(self._backlog) and self._selection.is_blind
        if is_idle and now < self._reads_capacity_at:
            return False
        self._reads_capacity_at = now + READ_CAPACITY_EVERY_S
        return True

    def _place(self, token: str) -> None:
        """Refuse late requests, dispatch those that have a lane, and set the time to wait."""
        self._backlog.advance(self._roster.broker_time.now_ms)
        for queued in self._backlog.late(self._max_batch):
            self.refuse(token, queued, refuse_late(queued))
        has_dispatched = self._dispatch(token, self._make_plan())
        is_busy = any(model in self._backlog.models for model in self._roster.lanes)
        self.rate.note(busy=is_busy)
        tenants = self._intake.tenants
        if self._backlog.late(1) or (has_dispatched and is_busy):
            self._patience_ms = 0
        elif tenants.is_in_use and self._room() and tenants.look_behind():
            # Room that nobody known wants, or may have: perhaps somebody far back in line does.
            self._patience_ms = 0
        elif self._backlog.next_ms is not None:
            left_ms = self._backlog.next_ms - self._roster.broker_time.now_ms
            self._patience_ms = max(1, min(self._patience_ms, math.ceil(left_ms)))

    def demands(self) -> list[Demand]:
        """What could run if its model had a worker; requests in back-off are excluded."""
        return self._backlog.demands(self._roster.broker_time.now_ms)

    def has_suspects(self, model: str) -> bool:
        """Whether suspects wait for a trial on that model."""
        queue = self._backlog.queue(model)
        return queue is not None and next(queue.suspects, None) is not None

    def fail_model(self, token: str, model: str, reason: str) -> None:
        """Refuse requests for a model that no host can load, at most a batch in a turn."""
        queue = self._backlog.queue(model)
        for queued in list(islice(queue or (), self._max_batch)):
            message = f"model: {model}: {reason}"
            self.refuse(token, queued, refuse(queued, Code.MODEL_UNAVAILABLE, message))
        if model in self._backlog.models:
            self._patience_ms = 0

    def take_in(self, token: str, entries: Iterable[Entry]) -> None:
        """Queue valid entries, answer invalid ones, bury what cannot be answered."""
        now_ms = self._roster.broker_time.now_ms
        strays: list[QueuedRequest] = []
        for entry in entries:
            match self._admission.admit(entry, now_ms):
                case QueuedRequest() as queued:
                    if queued.tenant and queued.is_stray:
                        strays.append(queued)
                    else:
                        self._backlog.add(queued)
                case Refused() as refused:
                    self.answer(token, entry, refused)
                case Unanswerable(reason):
                    log.warning("buried entry %s of %s: %s", entry.id, entry.intake, reason)
                    buried = self._scripts.bury(token, entry.intake, entry.id, reason)
                    if buried is Answered.DONE:
                        self._counts.buried()
        if strays:
            self._transfer(token, strays)

    def _transfer(self, token: str, strays: Iterable[QueuedRequest]) -> None:
        """Move requests with a tenant from common intakes, where XADD put them, to its own."""
        by_class: dict[PriorityClass, list[QueuedRequest]] = {}
        for queued in strays:
            by_class.setdefault(cast(PriorityClass, queued.intake), []).append(queued)
        for name, moved in by_class.items():
            entries = [Transfer(m.entry, m.tenant, m.client, m.id, m.digest) for m in moved]
            answers = self._scripts.transfer(token, name, entries)
            for queued, answer in zip(moved, answers, strict=True):
                if answer.code is Transferred.QUOTA:
                    self.refuse(token, queued, refuse_quota(queued, answer))
        self._intake.tenants.wake("")

    def answer(self, token: str, entry: Entry, refused: Refused) -> None:
        """Refuse an entry, which may be in the backlog or not."""
        queued = self._backlog.get(entry.intake, entry.id)
        if queued:
            self.refuse(token, queued, refused)
        else:
            self._answer(token, entry, refused)

    def refuse(self, token: str, queued: QueuedRequest, refused: Refused) -> None:
        """Refuse a request of the backlog."""
        self._drop(queued)
        self._spans.ended(queued, self._roster.broker_time.now_ms, error=str(refused.code))
        self._answer(token, queued, refused)

    def _drop(self, queued: QueuedRequest) -> None:
        """Forget a request that was not dispatched."""
        self._backlog.remove(queued)
        self._selection.settle(queued, None)

    def _answer(self, token: str, waiting: Entry | QueuedRequest, refused: Refused) -> None:
        intake, entry, model = waiting.intake, waiting.id, ""
        if isinstance(waiting, QueuedRequest):
            entry, model = waiting.entry, waiting.model
        log.info("refused %s/%s: %s", refused.client, refused.id, refused.message)
        reply = refusal(refused, refused.code, refused.message, published=waiting.published)
        reason = f"{refused.code}: {refused.message}" if refused.is_dead else ""
        answered = self._scripts.answer(
            token, intake, entry, refused, reply, dead=reason, digest=waiting.digest
        )
        if answered is Answered.DONE:
            self._counts.answered(model, class_of(intake), refused.code, is_dead=refused.is_dead)
        elif answered is Answered.REUSED:  # it has become a dead letter
            log.warning("buried entry %s of %s: %s", entry, intake, reused(refused.id))
            self._counts.buried(Code.ID_REUSED)

    def _room(self) -> int:
        """How many requests could be placed now, at most a batch."""
        return min(sum(lanes.room for lanes in self._roster.lanes.values()), self._max_batch)

    def _handle_events(self, events: Iterable[tuple[str, Fields]]) -> None:
        """Lanes have room again, or the roster changed and must be read again."""
        for entry, fields in events:
            kind, count = fields.get(b"event"), digits(fields.get(b"count"))
            if kind == b"capacity" and count is not None:
                worker = fields.get(b"worker", b"").decode(errors="replace")
                self._roster.free(worker, count, entry, work=digits(fields.get(b"work"), 15))
                self._backlog.tenants.held.wake()
            elif kind == b"tenants":
                intake = fields.get(b"intake", b"").decode(errors="replace")
                self._intake.tenants.wake(intake)
            else:
                self._roster.mark_stale()

    def _make_plan(self) -> list[PlannedDispatch]:
        """Choose lanes for queued requests, at most a batch; nothing is changed yet."""
        plan: list[PlannedDispatch] = []
        tenants = self._backlog.tenants
        tenants.planned.clear()
        for model, lanes in self._open_models():
            queue = self._backlog.queue(model)
            if queue is None or len(plan) >= self._max_batch:
                continue
            placed = make_plan(
                queue.suspects,
                queue.others,
                lanes,
                choose=self._selection.choose,
                most=self._max_batch - len(plan),
                trial_share=self._trial_share,
            )
            tenants.plan([item.queued for item in placed])
            plan += placed
        return plan

    def _open_models(self) -> Iterator[tuple[str, Lanes]]:
        """The lanes of each model that has room; each time another model is the first.

        Otherwise the first models could take the whole batch in every turn.
        """
        by_model = self._roster.lanes
        names = sorted(model for model, lanes in by_model.items() if lanes.room)
        names.sort(key=lambda name: name <= self._first)
        self._first = names[0] if names else ""
        for name in names:
            yield name, by_model[name]

    def _dispatch(self, token: str, plan: Sequence[PlannedDispatch]) -> bool:
        """Carry out a plan; whether there was anything to do."""
        if not plan:
            return False
        now_ms = self._roster.broker_time.now_ms
        charges = self._intake.tenants.charge(plan)
        moves = [
            Move(
                item.queued.intake,
                item.queued.entry,
                item.queued.client,
                item.queued.id,
                item.lane.worker,
                item.lane.limit,
                alone=item.alone,
                why=self._waits.tell(item.queued, now_ms, item.why),
                digest=item.queued.digest,
                on_trial=item.on_trial,
                charge=charge,
                deadline_ms=(item.queued.deadline_ms or 0) if item.queued.is_shifted else 0,
            )
            for item, charge in zip(plan, charges, strict=True)
        ]
        began = clock.monotonic()
        codes = self._scripts.dispatch(token, moves)
        took_s = clock.monotonic() - began
        self._counts.assign.observe(took_s)
        log.debug("dispatched %d in %.1f ms", len(moves), took_s * 1e3)
        self._settle(token, plan, codes)
        for charge, code in zip(charges, codes, strict=True):
            if charge and code is _DISPATCHED:
                self._backlog.tenants.note_dispatched(charge)
        return True

    def _settle(
        self, token: str, plan: Sequence[PlannedDispatch], codes: Sequence[Dispatched]
    ) -> None:
        stays = (Dispatched.CLOSED, Dispatched.FULL)
        by_worker: dict[str, list[PlannedDispatch]] = {}
        for item, code in zip(plan, codes, strict=True):
            queued = item.queued
            if code is _DISPATCHED:
                self._backlog.remove(queued, is_served=True)
                by_worker.setdefault(item.lane.worker, []).append(item)
                self._selection.settle(queued, item.lane)
                continue
            if code in stays:
                self._roster.mark_stale()
                continue
            if code is Dispatched.HELD:
                self._intake.tenants.hold(queued.tenant)
                continue
            self._drop(queued)
            self.has_missed = self.has_missed or code is Dispatched.GONE
            if code is Dispatched.REUSED:
                self._answer(token, queued, refuse(queued, Code.ID_REUSED, reused(queued.id)))
        for worker, items in by_worker.items():
            self._note_dispatched(worker, items)

    def _note_dispatched(self, worker: str, items: Sequence[PlannedDispatch]) -> None:
        work = sum([item.queued.features.work for item in items])
        has_trials = any(item.alone or item.on_trial for item in items)
        self._roster.add_load(worker, len(items), work=work, has_trials=has_trials)
        self.rate.count(len(items))
        now_ms = self._roster.broker_time.now_ms
        for item in items:
            queued = item.queued
            waited_s = max(0.0, now_ms - queued.since_ms) / 1000
            self._counts.queue_wait[class_of(queued.intake)].observe(waited_s)
            if item.match is not None:
                self._counts.prefix_match.observe(item.match)
            self._spans.ended(queued, now_ms, worker=worker)
