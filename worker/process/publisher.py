"""Publishes the events of the engine: a thread that sends each step in one script call."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Final, TypeVar

import redis

from tokenyard import clock
from tokenyard.broker.outage import Backoff, Outage
from tokenyard.protocol.errors import Code
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import HandedBack, Publication, Published
from tokenyard.telemetry.tracing import Tracer
from worker.engines import EngineInfo, RequestError, TokenDelta
from worker.process import outcomes
from worker.process.outcomes import Aborted, Outcome, Remembered, Run
from worker.process.recent_results import RecentResults
from worker.process.stats import EngineSpans, RunningStats

log = logging.getLogger("tokenyard.worker.publisher")

T = TypeVar("T")
_Step = tuple[int | None, Sequence[Outcome]]  # generation epoch, events
_Shipment = tuple[Run, Outcome, Publication]
_Ship = Callable[[str, Sequence[Publication]], list[Published]]
#: Steps that may wait to be published before the engine has to wait.
MOST_WAITING = 64
STEPS_AT_ONCE = 16
_PUBLISHED: Final = Published.PUBLISHED  # enum attribute access is slow; bound once
#: A delta is taken on trust for so long after its attempt was compared with the ledger, which the
#: server checks by its own clock. An id lives again a second after its end at the earliest.
TRUSTED_MS: Final = 800
#: The longest time until the next step that is part of it.
_NEXT_STEP_MS: Final = 100
#: The pause before a request that the engine could not serve is tried again.
RETRY_PAUSE = Backoff(cap=30.0, base=0.5)


class Publisher:
    """Publishes for one incarnation of a worker until its lease is lost.

    Both scripts are idempotent, so a call whose answer was lost is repeated. While Redis is away
    the queue fills up and the engine waits.
    """

    def __init__(
        self,
        scripts: Scripts,
        worker: str,
        info: EngineInfo,
        *,
        on_stale: Callable[[str, str], None],
        on_lost: Callable[[], None],
        stats: RunningStats,
        tracer: Tracer,
        results: RecentResults,
        stream_interval_ms: int,
    ) -> None:
        """``on_stale`` takes a lane entry and, if that may be cancelled, `Aborted.charged`."""
        self.runs: dict[str, Run] = {}  # by lane entry
        self.attempts = 0  # calls made: a sign of life while Redis is away
        self._scripts = scripts
        self._worker = worker
        self._info = info
        self._on_stale = on_stale
        self._on_lost = on_lost
        self._stats = stats
        self._spans = EngineSpans(tracer, info, worker)
        self._results = results
        self._pace = StreamPace(stream_interval_ms)
        self._epoch: int | None = None  # of the last step
        # Steps with the epoch in which they were made, and cancelled requests. A SimpleQueue wakes
        # its reader in half the time of a Queue; `put` enforces the bound.
        self._queue: queue.SimpleQueue[_Step | Aborted] = queue.SimpleQueue()
        self._has_taken = threading.Event()
        self._outage = Outage(log, f"publishing for {worker}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"publisher-{worker}", daemon=True)

    def start(self) -> None:
        """Begin publishing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop publishing and drop waiting steps, which another attempt repeats; idempotent."""
        self._stop.set()

    def put(self, events: Sequence[Outcome], epoch: int | None = None) -> None:
        """Publish the events of one step; blocks while too many steps wait.

        ``epoch`` is the generation epoch of the step. Only the engine's thread calls it.
        """
        while events and not self._stop.is_set():
            if self._queue.qsize() < MOST_WAITING:
                self._queue.put((epoch, events))
                return
            clock.wait(self._has_taken, 0.2)
            self._has_taken.clear()

    def settle(self, aborted: Aborted) -> None:
        """Let the tenant of a cancelled request pay what was generated."""
        self._queue.put(aborted)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.run_once()

    def run_once(self) -> None:
        """Publish the waiting steps; wait a little for the first."""
        try:
            taken = [self._queue.get(timeout=self._pace.wait_s(0.2))]
        except queue.Empty:
            self._publish((), self._epoch)
            return
        waiting = min(STEPS_AT_ONCE, self._queue.qsize())
        taken += [self._queue.get_nowait() for _ in range(waiting)]
        if not self._has_taken.is_set():
            self._has_taken.set()
        steps = [one for one in taken if not isinstance(one, Aborted)]
        for epoch, alike in itertools.groupby(steps, itemgetter(0)):
            self._epoch = epoch
            self._publish([event for _, events in alike for event in events], epoch)
        if used := [one.used for one in taken if isinstance(one, Aborted)]:
            self._call(lambda: self._scripts.settle_cancelled(self._worker, used))

    def _publish(self, events: Sequence[Outcome], epoch: int | None) -> None:
        events = outcomes.merge(self._pace.due(events, self.runs))
        for event in events:
            if isinstance(event, RequestError) and event.code is Code.INFERENCE_ERROR:
                self._hand_back(event)
        deltas, results = self._publications(events, epoch)
        if deltas:
            self._ship(deltas, self._emit)
        if results:
            self._ship(results, self._scripts.finish)
            for run, _, _ in results:
                self.runs.pop(run.assignment.entry, None)

    def _publications(
        self, events: Sequence[Outcome], epoch: int | None
    ) -> tuple[list[_Shipment], list[_Shipment]]:
        now = clock.monotonic()
        deltas: list[_Shipment] = []
        results: list[_Shipment] = []
        for event in events:
            run = self.runs.get(event.key)
            if run is None:  # stale
                continue
            if run.first_token is None and not run.assignment.published:
                run.first_token = now if isinstance(event, TokenDelta) else None
                if run.first_token is not None:
                    self._stats.note_first(run, now)
            if isinstance(event, Remembered):
                # Deltas of the earlier attempt may be published beyond what this one began with.
                run.seq = self._call(partial(self._scripts.count_published, run.assignment)) or 0
            if isinstance(event, TokenDelta):
                reply = outcomes.delta_reply(run, event)
                told = outcomes.epoch_to_store(run, reply, epoch)
                item = Publication(run.assignment, reply, told, self._is_trusted(run))
                deltas.append((run, event, item))
            else:
                reply = outcomes.result_reply(run, event, self._info, self._worker, now, epoch)
                results.append((run, event, Publication(run.assignment, reply)))
        return deltas, results

    def _is_trusted(self, run: Run) -> bool:
        """Whether its attempt was compared lately, by a clock that was not set back since."""
        age_ms = self._scripts.emitted_ms - run.compared_ms
        return bool(run.compared_ms) and 0 <= age_ms < TRUSTED_MS

    def _emit(self, worker: str, items: Sequence[Publication]) -> list[Published]:
        return self._scripts.emit(worker, items, self._scripts.emitted_ms + _NEXT_STEP_MS)

    def _hand_back(self, failed: RequestError) -> None:
        """Return a request that another attempt may complete; the leader decides whether."""
        run = self.runs.pop(failed.key, None)
        if run is None:
            return
        assignment = run.assignment
        self._stats.error = f"{assignment.request.id}: {failed.message}"
        pause_ms = int(1000 * RETRY_PAUSE.compute(assignment.faults + 1))
        log.warning("%s: %s; requeued for %d ms", assignment.request.id, failed.message, pause_ms)
        code = self._requeue(assignment, pause_ms, failed.message)
        if code is HandedBack.LEASE_LOST:
            self._lose()
        elif code is HandedBack.HANDED_BACK:
            self._stats.note_fault()
            self._spans.ended(run, failed)
        elif code is HandedBack.STALE:
            self._on_stale(failed.key, outcomes.charged_name(assignment))

    def _hand_back_lost_stream(self, assignment: Assignment) -> None:
        """Return a stream whose published tokens the server has lost.

        That happens when the server comes back without its last writes. The next attempt continues
        after the tokens that are left.
        """
        why = "the server has lost tokens that were published"
        code = self._requeue(assignment, 0, why)
        if code is HandedBack.HANDED_BACK:
            log.warning("%s: %s; requeued", assignment.request.id, why)

    def _requeue(self, assignment: Assignment, pause_ms: int, why: str) -> HandedBack | None:
        model = self._info.model
        return self._call(
            lambda: self._scripts.hand_back(
                self._worker, assignment, pause_ms, why, base_model=model
            )
        )

    def _lose(self) -> None:
        log.warning("%s has lost its lease", self._worker)
        self.stop()
        self._on_lost()

    def _ship(self, shipments: Sequence[_Shipment], ship: _Ship) -> None:
        """Publish in one call, and act on each return code."""
        before, items = self.attempts, [item for _, _, item in shipments]
        codes = self._call(lambda: ship(self._worker, items))
        # Otherwise it was cancelled, and the cancelling side has published the result.
        may_repeat = self.attempts > before + 1
        published: list[tuple[Run, Outcome]] = []
        ended: list[tuple[Run, Publication]] = []
        for (run, outcome, item), code in zip(shipments, codes or (), strict=False):
            if code is _PUBLISHED or (may_repeat and code is Published.REPEATED):
                published.append((run, outcome))
                if not item.is_trusted:
                    run.compared_ms = self._scripts.emitted_ms
                if not isinstance(outcome, TokenDelta):
                    self._spans.ended(run, outcome)
                    ended.append((run, item))
            elif code is Published.LEASE_LOST:
                self._stats.note_stale(len(items))
                self._lose()
                return
            elif code is Published.STALE:
                self._stats.note_stale(1)
                log.warning("%s belongs to another attempt", run.assignment.request.id)
                self.runs.pop(run.assignment.entry, None)
                self._spans.ended(run, None)
                is_running = isinstance(outcome, TokenDelta)
                charged = outcomes.charged_name(run.assignment) if is_running else ""
                self._on_stale(run.assignment.entry, charged)
                if is_running:
                    self._hand_back_lost_stream(run.assignment)
        if ended:
            self._results.keep(ended, clock.monotonic())
        self._stats.note(published)

    def _call(self, call: Callable[[], T]) -> T | None:
        """Repeat a call until it is answered; None if this incarnation ends first."""
        while not self._stop.is_set():
            self.attempts += 1
            try:
                answer = call()
                self._outage.over()
                return answer
            except redis.RedisError as error:
                clock.wait(self._stop, self._outage.note(error))
        return None


#: With more streams than this, a worker publishes those that name no interval in its usual one.
FEW_STREAMS: Final = 32


class StreamPace:
    """Holds deltas back, so that a stream has one in each of its intervals.

    The first of a request, and its end, wait for nothing. The streams of an interval are published
    together.
    """

    def __init__(self, usual_ms: int) -> None:
        """``usual_ms`` is the interval of streams that name none, while there are many."""
        self._usual_ms = usual_ms
        # By interval in ms: what is held, and when it is due (monotonic).
        self._held: dict[int, list[Outcome]] = {}
        self._due: dict[int, float] = {}

    def due(self, events: Sequence[Outcome], runs: Mapping[str, Run]) -> list[Outcome]:
        """What of these and of earlier events is to be published now."""
        now = clock.monotonic()
        found: list[Outcome] = []
        for event in events:
            interval_ms = self._interval_ms(event, runs)
            if interval_ms:
                self._held.setdefault(interval_ms, []).append(event)
            else:
                found.append(event)
        for interval_ms in [one for one in self._held if now >= self._due.get(one, now)]:
            found += self._held.pop(interval_ms)
            self._due[interval_ms] = now + interval_ms / 1000
        return found

    def _interval_ms(self, event: Outcome, runs: Mapping[str, Run]) -> int:
        run = runs.get(event.key) if isinstance(event, TokenDelta) else None
        if run is None:
            return 0
        if run.interval_ms is None:  # this is its first delta
            usual_ms = self._usual_ms if len(runs) > FEW_STREAMS else 0
            asked_ms = run.assignment.request.stream_interval_ms
            run.interval_ms = usual_ms if asked_ms is None else asked_ms
            return 0
        return run.interval_ms

    def wait_s(self, most_s: float) -> float:
        """How long nothing becomes due, at most so long."""
        due = min((self._due[one] for one in self._held), default=math.inf)
        return min(most_s, max(0.0, due - clock.monotonic()))
