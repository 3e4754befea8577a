"""The time in which a worker process holds a model: assignments in, engine steps, events out."""

from __future__ import annotations

import heapq
import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from tokenyard.protocol.control import PauseMode
from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.wire import Assignment
from worker.engines import Engine, RequestFailed
from worker.messages import (
    Done,
    Drain,
    Drained,
    Fenced,
    LaneReleased,
    Paused,
    PauseEngine,
    Profile,
    ReloadWeights,
    ResetPrefixCache,
    Serve,
    SetEpoch,
    Sleep,
    Stop,
    ToController,
    ToProcess,
    Unload,
    UnpauseEngine,
    Wake,
)
from worker.process.ended import Ended
from worker.process.outcomes import Expired, Outcome, Remembered, Run

log = logging.getLogger("tokenyard.worker.loop")

IDLE_WAIT_S = 0.5
#: The same while it drains: the last results are being published, and somebody waits for that.
DRAINING_WAIT_S = 0.005
#: Deadlines of requests that have ended are kept up to so many.
LEAST_CLEARED = 1000


class Delivery(Struct, frozen=True):
    """Assignments that came in on the lane of ``worker``."""

    worker: str
    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class Stale:
    """A request that ``worker`` may publish no more, by lane entry."""

    worker: str
    entry: str


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """``worker`` may publish nothing any more."""

    worker: str


Item = Delivery | Stale | LeaseLost | ToProcess
ControlCommand = Sleep | Wake | ResetPrefixCache | Profile | ReloadWeights


class Term(Protocol):
    """One incarnation's time in office: where its work comes from, and its right to publish."""

    #: The generation epoch in which the events are made that come now.
    epoch: int | None

    @property
    def worker(self) -> str:
        """The incarnation."""

    @property
    def clock_ms(self) -> float:
        """By how much the clock that deadlines go by is ahead of ours."""

    @property
    def runs(self) -> dict[str, Run]:
        """What has been taken and is not answered yet, by lane entry."""

    @property
    def attempts(self) -> int:
        """Tries to publish: a sign of life while nobody can be reached."""

    def start(self) -> None:
        """Begin reading and publishing."""

    def put(self, events: Sequence[Outcome]) -> None:
        """Publish the events of one step; waits while too many wait already."""

    def end(self) -> None:
        """Let go of the lane; idempotent."""


class Terms(Protocol):
    """Makes the term of a worker: its threads and their connections."""

    def __call__(self, worker: str, loop: EngineLoop) -> Term:
        """The term of ``worker``, not started; what it hears goes into the loop's inbox."""


class ControlHandler(Protocol):
    """What is done to an engine beside giving it requests."""

    def __call__(self, command: ControlCommand) -> None:
        """Do it and tell the controller."""


class EngineLoop:
    """Runs the engine in the calling thread; everything reaches it through its inbox."""

    def __init__(
        self,
        engine: Engine,
        inbox: queue.SimpleQueue[Item],
        terms: Terms,
        care: ControlHandler,
        tell: Callable[[ToController], None],
        ended: Ended | None = None,
    ) -> None:
        """``ended`` knows what was answered in all terms of the engine."""
        self.inbox = inbox
        self.steps = 0
        self.is_stopped = False  # told to end the process, not only the engine
        self.epoch: int | None = None  # generation epoch, stamped on results from now on
        self._engine = engine
        self._terms = terms
        self._care = care
        self._tell = tell
        self._ended = ended or Ended()
        self._names = {"", engine.info.model, *engine.info.adapters}
        self._term: Term | None = None
        self._deadlines: list[tuple[float, str]] = []  # heap of unix ms by our clock, lane entry
        self._draining = False
        self._pause: PauseMode | None = None
        self._is_at_rest = False  # paused, and nothing runs
        self._held: dict[str, Assignment] = {}  # what came in since it was paused, by lane entry
        self._is_over = False

    @property
    def progress(self) -> int:
        """Grows while the worker is alive: engine steps, and tries to reach Redis."""
        term = self._term
        return self.steps + (term.attempts if term else 0)

    @property
    def unfinished(self) -> int:
        """Requests that have been taken, not yet been answered, and are not to wait."""
        term = self._term
        return len(term.runs) if term and not self._is_at_rest else 0

    def run(self) -> None:
        """Work until the model has to go."""
        while not self._is_over:
            self.run_once()
        self._end_term()

    def run_once(self) -> None:
        """One turn: take what came in, step the engine, give the events away."""
        self._take_all()
        self._expire()
        if self._may_step:
            self._give(self._engine.step())
            self.steps += 1
        elif self._draining and not self.unfinished and self.inbox.empty():
            self._draining = False
            self._tell(Drained())
        elif self._pause == "wait" and not self._is_at_rest and self.unfinished <= len(self._held):
            self._rest()

    @property
    def _may_step(self) -> bool:
        return self._engine.has_unfinished and self._pause != "keep"

    def _take_all(self) -> None:
        """Everything in the inbox; waits for it only where the engine has nothing to do."""
        is_ending = self._draining or (self._pause == "wait" and not self._is_at_rest)
        wait_s = DRAINING_WAIT_S if is_ending else IDLE_WAIT_S
        try:
            self._take(self.inbox.get(block=not self._may_step, timeout=wait_s))
            while True:
                self._take(self.inbox.get_nowait())
        except queue.Empty:
            return

    def _take(self, item: Item) -> None:
        match item:
            case Delivery(worker, assignments):
                for assignment in assignments:
                    self._admit(worker, assignment)
            case Stale(worker, entry):
                if self._term and self._is_current(worker):
                    self._term.runs.pop(entry, None)
                    self._held.pop(entry, None)
                    self._engine.abort([entry])
            case LeaseLost(worker):
                if self._is_current(worker):
                    self._end_term()
                    self._tell(Fenced(worker))
            case Serve(worker):
                self._end_term()
                self._term = self._terms(worker, self)
                self._term.epoch = self.epoch
                self._term.start()
            case Drain():
                self._draining = True
            case SetEpoch() | PauseEngine() | UnpauseEngine():
                self._run_state(item)
            case Sleep() | Wake() | ResetPrefixCache() | Profile() | ReloadWeights():
                self._tend(item)
            case Unload() | Stop():
                self._is_over = True
                self.is_stopped = isinstance(item, Stop)
            case _:
                log.error("%s makes no sense while a model is held", item)

    def _tend(self, command: ControlCommand) -> None:
        if isinstance(command, Sleep):
            self._draining = False
            self._end_term()
        self._care(command)
        if isinstance(command, ReloadWeights):
            self._ended.forget()

    # Run state

    def _run_state(self, command: SetEpoch | PauseEngine | UnpauseEngine) -> None:
        match command:
            case PauseEngine(mode):
                self._begin_pause(mode)
                return
            case UnpauseEngine():
                self._go_on()
            case SetEpoch(epoch):
                self.epoch = epoch
                if self._term:
                    self._term.epoch = epoch
        self._tell(Done(command))

    def _begin_pause(self, mode: PauseMode) -> None:
        """What has not been begun will not be; what runs is dropped, finished or kept."""
        self._pause, self._is_at_rest = mode, False
        if mode == "abort" and self._term and self._term.runs:
            self._give_up_lane()
        if mode != "wait":
            self._rest()

    def _rest(self) -> None:
        """Nothing runs, and nothing will before it is told to go on."""
        self._is_at_rest = True
        if self._pause:
            self._tell(Paused(self._pause))
        if self._held:
            self._release_held()

    def _release_held(self) -> None:
        """What cannot be kept must be another worker's, or another incarnation's."""
        if self._is_at_rest and self._pause != "keep":
            self._give_up_lane()

    def _give_up_lane(self) -> None:
        if self._term:
            worker = self._term.worker
            self._end_term()
            self._tell(LaneReleased(worker))

    def _go_on(self) -> None:
        self._pause, self._is_at_rest = None, False
        held, self._held = self._held, {}
        for entry, assignment in held.items():
            if self._term:
                self._term.runs[entry] = Run(assignment, time.monotonic(), self.epoch)
                self._begin(assignment)

    # Requests

    def _is_current(self, worker: str) -> bool:
        return self._term is not None and self._term.worker == worker

    def _admit(self, worker: str, assignment: Assignment) -> None:
        term = self._term
        if term is None or term.worker != worker:
            return
        if assignment.entry in term.runs:  # the lane is read anew after an outage
            return
        term.runs[assignment.entry] = Run(assignment, time.monotonic(), self.epoch)
        if assignment.request.deadline_ms is not None:
            self._note_deadline(term, assignment.entry, assignment.request.deadline_ms)
        if self._pause:
            self._held[assignment.entry] = assignment
            self._release_held()
        else:
            self._begin(assignment)

    def _begin(self, assignment: Assignment) -> None:
        try:
            if assignment.fault:
                raise InvalidRequest("request", assignment.fault)
            if assignment.request.model not in self._names:
                fault = f"{assignment.request.model} is not served here"  # goes back to the yard
                self._give([RequestFailed(assignment.entry, Code.INFERENCE_ERROR, fault)])
                return
            known = self._ended.find(assignment)
            if known is None:
                self._engine.add(assignment)
            else:
                log.info("%s has ended here before", assignment.request.id)
                self._give([Remembered(assignment.entry, known)])
        except InvalidRequest as refused:
            self._give([RequestFailed(assignment.entry, Code.INVALID_REQUEST, str(refused))])

    def _note_deadline(self, term: Term, entry: str, deadline_ms: int) -> None:
        runs = term.runs
        if len(self._deadlines) > LEAST_CLEARED + 2 * len(runs):  # of most that have ended since
            self._deadlines = [item for item in self._deadlines if item[1] in runs]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_ms - term.clock_ms, entry))

    def _expire(self) -> None:
        """End the requests whose deadlines have passed, with what has been made of them."""
        while self._deadlines and self._deadlines[0][0] <= time.time() * 1000:
            _, entry = heapq.heappop(self._deadlines)
            if self._term and entry in self._term.runs:
                self._held.pop(entry, None)
                made = self._engine.take_out(entry)
                has_begun = made is not None and any(one.tokens for one in made.choices)
                where = "running" if has_begun else "on the worker's lane"
                self._give([Expired(entry, made, where)])

    def _give(self, events: Sequence[Outcome]) -> None:
        if self._term and events:
            self._term.put(events)

    def _end_term(self) -> None:
        """Drop what the current incarnation holds: it is another's to finish."""
        term, self._term = self._term, None
        self._deadlines.clear()
        self._held.clear()
        if term is None:
            return
        term.end()
        self._engine.abort(list(term.runs))
