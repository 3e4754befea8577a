"""The heart of a worker process: assignments in, engine steps, events out."""

from __future__ import annotations

import heapq
import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenyard.errors import Code, InvalidRequest
from tokenyard.wire import Assignment
from worker.engines import Engine, Faulted
from worker.messages import Drain, Drained, Fenced, Serve, Stop, ToController
from worker.outcomes import Expired, Outcome, Run
from worker.publisher import Publisher
from worker.reader import LaneReader

log = logging.getLogger("tokenyard.worker.loop")

IDLE_WAIT_S = 0.5
#: Deadlines of requests that have ended are kept up to so many.
LEAST_CLEARED = 1000


@dataclass(frozen=True, slots=True)
class Delivery:
    """An assignment that came in on the lane of ``worker``."""

    worker: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Stale:
    """A request that ``worker`` may publish no more, by lane entry."""

    worker: str
    entry: str


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """``worker`` may publish nothing any more."""

    worker: str


Item = Delivery | Stale | LeaseLost | Serve | Drain | Stop


@dataclass(slots=True)
class Term:
    """One incarnation's time in office: its lane and its right to publish."""

    worker: str
    reader: LaneReader
    publisher: Publisher
    clock_ms: float = 0.0  # the server's clock less ours

    def start(self) -> None:
        """Begin reading and publishing."""
        self.publisher.start()
        self.reader.start()

    def end(self) -> None:
        """Let go of the lane; idempotent."""
        self.reader.stop()
        self.publisher.stop()


class Terms(Protocol):
    """Makes the term of a worker: its threads and their connections."""

    def __call__(self, worker: str, loop: EngineLoop) -> Term:
        """The term of ``worker``, not started; what it hears goes into the loop's inbox."""


class EngineLoop:
    """Runs the engine in the calling thread; everything reaches it through its inbox."""

    def __init__(self, engine: Engine, terms: Terms, tell: Callable[[ToController], None]) -> None:
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.steps = 0
        self._engine = engine
        self._terms = terms
        self._tell = tell
        self._term: Term | None = None
        self._deadlines: list[tuple[float, str]] = []  # heap of unix ms by our clock, lane entry
        self._draining = False
        self._stopped = False

    @property
    def progress(self) -> int:
        """Grows while the worker is alive: engine steps, and tries to reach Redis."""
        term = self._term
        return self.steps + (term.publisher.attempts if term else 0)

    @property
    def unfinished(self) -> int:
        """Requests that have been taken and not yet been answered."""
        term = self._term
        return len(term.publisher.runs) if term else 0

    def run(self) -> None:
        """Work until `Stop`."""
        while not self._stopped:
            self.run_once()
        self._end_term()

    def run_once(self) -> None:
        """One turn: take what came in, step the engine, give the events away."""
        self._take_all()
        self._expire()
        if self._engine.has_unfinished:
            self._give(self._engine.step())
            self.steps += 1
        elif self._draining and not self.unfinished and self.inbox.empty():
            self._draining = False
            self._tell(Drained())

    def _take_all(self) -> None:
        """Everything in the inbox; waits for it only where the engine has nothing to do."""
        try:
            self._take(self.inbox.get(block=not self._engine.has_unfinished, timeout=IDLE_WAIT_S))
            while True:
                self._take(self.inbox.get_nowait())
        except queue.Empty:
            return

    def _take(self, item: Item) -> None:
        match item:
            case Delivery():
                self._admit(item)
            case Stale(worker, entry):
                if self._term and self._is_current(worker):
                    self._term.publisher.runs.pop(entry, None)
                    self._engine.abort([entry])
            case LeaseLost(worker):
                if self._is_current(worker):
                    self._end_term()
                    self._tell(Fenced(worker))
            case Serve(worker):
                self._end_term()
                self._term = self._terms(worker, self)
                self._term.start()
            case Drain():
                self._draining = True
            case Stop():
                self._stopped = True

    def _is_current(self, worker: str) -> bool:
        return self._term is not None and self._term.worker == worker

    def _admit(self, delivery: Delivery) -> None:
        term = self._term
        if term is None or term.worker != delivery.worker:
            return
        assignment = delivery.assignment
        term.publisher.runs[assignment.entry] = Run(assignment, time.monotonic())
        self._note_deadline(term, assignment)
        try:
            if assignment.fault:
                raise InvalidRequest("request", assignment.fault)
            self._engine.add(assignment)
        except InvalidRequest as fault:
            self._give([Faulted(assignment.entry, Code.INVALID_REQUEST, str(fault))])

    def _note_deadline(self, term: Term, assignment: Assignment) -> None:
        deadline_ms, runs = assignment.request.deadline_ms, term.publisher.runs
        if deadline_ms is None:
            return
        if len(self._deadlines) > LEAST_CLEARED + 2 * len(runs):  # of most that have ended since
            self._deadlines = [item for item in self._deadlines if item[1] in runs]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_ms - term.clock_ms, assignment.entry))

    def _expire(self) -> None:
        """End the requests whose deadlines have passed, with what has been made of them."""
        while self._deadlines and self._deadlines[0][0] <= time.time() * 1000:
            _, entry = heapq.heappop(self._deadlines)
            if self._term and entry in self._term.publisher.runs:
                made = self._engine.take_out(entry)
                has_begun = made is not None and any(one.tokens for one in made.choices)
                where = "running" if has_begun else "on the worker's lane"
                self._give([Expired(entry, made, where)])

    def _give(self, events: Sequence[Outcome]) -> None:
        if self._term and events:
            self._term.publisher.put(events)

    def _end_term(self) -> None:
        """Drop what the current incarnation holds: it is another's to finish."""
        term, self._term = self._term, None
        self._deadlines.clear()
        if term is None:
            return
        term.end()
        self._engine.abort(list(term.publisher.runs))
