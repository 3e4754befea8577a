"""The engine loop, while a worker process holds a model: assignments in, steps, events out."""

from __future__ import annotations

import heapq
import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenyard import clock
from tokenyard.protocol.control import PauseMode
from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.wire import Assignment
from worker import messages
from worker.engines import Engine, Memory, RequestError, Unsupported
from worker.process.lane_session import LaneSession
from worker.process.outcomes import Aborted, Expired, Outcome, Remembered, Run
from worker.process.recent_results import RecentResults

log = logging.getLogger("tokenyard.worker.loop")

IDLE_WAIT_S = 0.5
#: The same while it drains: the last results are being published and the controller waits.
DRAINING_WAIT_S = 0.005
PROGRESS_EVERY_S = 1.0
#: Deadlines of ended requests are cleared once there are more than this.
LEAST_CLEARED = 1000
#: Opens the lane session of a worker, which is not started yet.
OpenSession = Callable[[str], LaneSession]


class EngineLoop:
    """Runs the engine in the calling thread; everything reaches it through its inbox."""

    def __init__(
        self,
        engine: Engine,
        inbox: queue.SimpleQueue[messages.ToProcess],
        open_session: OpenSession,
        memory: Callable[[], Memory],
        send: Callable[[messages.ToController], None],
        results: RecentResults,
    ) -> None:
        """``memory`` measures the process, ``results`` holds what was answered in all sessions."""
        self.inbox = inbox
        self.steps = 0
        self.is_stopped = False  # the process shall end, not only the engine
        self.epoch: int | None = None  # generation epoch of results from now on
        self.engine = engine
        self._open_session = open_session
        self._memory = memory
        self._send = send
        self._results = results
        self._names = {"", engine.info.model, *engine.info.adapters}
        self._session: LaneSession | None = None
        self._deadlines: list[tuple[float, str]] = []  # heap of `monotonic`, lane entry
        self._draining = False
        self._pause: PauseMode | None = None
        self._is_at_rest = False  # paused, nothing runs
        self._held: dict[str, Assignment] = {}  # arrived while paused, by lane entry
        self._is_over = False
        self._note_made_at = 0.0  # monotonic

    @property
    def progress(self) -> int:
        """Grows while the worker is alive: engine steps and tries to reach Redis."""
        session = self._session
        return self.steps + (session.attempts if session else 0)

    @property
    def unfinished(self) -> int:
        """Requests that were taken and are unanswered; 0 while paused at rest."""
        session = self._session
        return len(session.runs) if session and not self._is_at_rest else 0

    def run(self) -> None:
        """Run until the model is unloaded or the process stops."""
        while not self._is_over:
            self.run_once()
        self._end_session()

    def run_once(self) -> None:
        """One turn: take what arrived, step the engine, publish the events."""
        self._take_all()
        self._expire()
        if self._may_step:
            self._put(self.engine.step())
            self.steps += 1
            self._note_made()
        elif self._draining and not self.unfinished and self.inbox.empty():
            self._draining = False
            self._send(messages.Drained())
        elif self._pause == "wait" and not self._is_at_rest and self.unfinished <= len(self._held):
            self._rest()

    @property
    def _may_step(self) -> bool:
        return self.engine.has_unfinished and self._pause != "keep"

    def _take_all(self) -> None:
        """Take everything in the inbox; wait for it only while the engine has nothing to do."""
        is_ending = self._draining or (self._pause == "wait" and not self._is_at_rest)
        wait_s = DRAINING_WAIT_S if is_ending else IDLE_WAIT_S
        try:
            self._take(self.inbox.get(block=not self._may_step, timeout=wait_s))
            while True:
                self._take(self.inbox.get_nowait())
        except queue.Empty:
            return

    def _take(self, item: messages.ToProcess) -> None:
        match item:
            case messages.Delivery(worker, assignments):
                for assignment in assignments:
                    self._admit(worker, assignment)
            case messages.AbortRequests(worker, entries, charged):
                for entry in entries:
                    self._drop(worker, entry, charged)
            case messages.LeaseLost(worker):
                if self._session and self._session.worker == worker:
                    self._end_session()
                    self._send(messages.Fenced(worker))
            case messages.Serve(worker):
                self._end_session()
                self._session = self._open_session(worker)
                self._session.start()
            case messages.Sleep() | messages.Wake() | messages.ReloadWeights():
                self._change_engine(item)
            case messages.Drain() | messages.EngineCommand():
                self._set_run_state(item)
            case messages.OutputsReady():
                pass  # it has ended the wait
            case messages.Unload() | messages.Stop():
                self._is_over = True
                self.is_stopped = isinstance(item, messages.Stop)
            case _:
                log.error("unexpected while a model is loaded: %s", item)

    def _change_engine(
        self, command: messages.Sleep | messages.Wake | messages.ReloadWeights
    ) -> None:
        """Run a command and report; one that the engine does not support changes nothing."""
        began = clock.monotonic()
        try:
            match command:
                case messages.Sleep(level):
                    self._draining = False
                    self._end_session()
                    self.engine.sleep(level)
                    self._send(messages.Asleep(clock.monotonic() - began, self._memory()))
                case messages.Wake():
                    self.engine.wake()
                    phases_s = {"wake": clock.monotonic() - began}
                    info = replace(self.engine.info, phases_s=phases_s)
                    self._send(messages.Ready(info, self._memory()))
                case messages.ReloadWeights(path):
                    self._results.forget()
                    self.engine.reload(path)
                    self._send(messages.Done(command))
        except Unsupported as error:
            refused = command if isinstance(command, messages.ReloadWeights) else None
            self._send(messages.CommandRefused(str(error), refused))

    # Run state

    def _set_run_state(self, command: messages.Drain | messages.EngineCommand) -> None:
        match command:
            case messages.Drain():
                self._draining = True
            case messages.PauseEngine(mode):
                self._pause_engine(mode)
            case messages.UnpauseEngine():
                self._resume()
                self._send(messages.Done(command))
            case messages.SetEpoch(epoch):
                self.epoch = epoch
                self._send(messages.Done(command))

    def _pause_engine(self, mode: PauseMode) -> None:
        """Begin no request; drop, finish or keep the running ones, by ``mode``."""
        self._pause, self._is_at_rest = mode, False
        self.engine.freeze(mode == "keep")
        if mode == "abort" and self._session and self._session.runs:
            self._release_lane()
        if mode != "wait":
            self._rest()

    def _rest(self) -> None:
        """Nothing runs until the engine is unpaused."""
        self._is_at_rest = True
        if self._pause:
            self._send(messages.Done(messages.PauseEngine(self._pause)))
        if self._held:
            self._release_held()

    def _release_held(self) -> None:
        """Give requests back that must not wait here: another worker may run them."""
        if self._is_at_rest and self._pause != "keep":
            self._release_lane()

    def _release_lane(self) -> None:
        if self._session:
            worker = self._session.worker
            self._end_session()
            self._send(messages.LaneReleased(worker))

    def _resume(self) -> None:
        self._pause, self._is_at_rest = None, False
        self.engine.freeze(False)
        held, self._held = self._held, {}
        for entry, assignment in held.items():
            if self._session:
                self._session.runs[entry] = self._run_of(assignment)
                self._begin(assignment)

    # Requests

    def _admit(self, worker: str, assignment: Assignment) -> None:
        session = self._session
        if session is None or session.worker != worker:
            return
        if assignment.entry in session.runs:  # the lane is read again after an outage
            return
        session.runs[assignment.entry] = self._run_of(assignment)
        if assignment.request.deadline_ms is not None:
            self._note_deadline(session, assignment.entry, assignment.request.deadline_ms)
        if self._pause:
            self._held[assignment.entry] = assignment
            self._release_held()
        else:
            self._begin(assignment)

    def _run_of(self, assignment: Assignment) -> Run:
        return Run(assignment.without_media, clock.monotonic(), self.epoch)

    def _begin(self, assignment: Assignment) -> None:
        try:
            if assignment.fault:
                raise InvalidRequest("request", assignment.fault)
            if assignment.request.model not in self._names:
                reason = f"{assignment.request.model} is not served here"  # goes back to the yard
                self._put([RequestError(assignment.entry, Code.INFERENCE_ERROR, reason)])
                return
            known = self._results.find(assignment)
            if known is None:
                self.engine.add(assignment)
            else:
                log.info("%s: this process already has its result", assignment.request.id)
                self._put([Remembered(assignment.entry, known)])
        except InvalidRequest as refused:
            self._put([RequestError(assignment.entry, Code.INVALID_REQUEST, str(refused))])

    def _drop(self, worker: str, entry: str, charged: str) -> None:
        """Give up a request; if somebody is charged for it, report what was generated."""
        session = self._session
        if session is None or session.worker != worker:
            return
        is_held = self._held.pop(entry, None) is not None
        if not charged:
            session.runs.pop(entry, None)
            self.engine.abort([entry])
            return
        made = self.engine.take_out(entry)
        if made is None and not is_held and entry in session.runs:
            return  # its end is on its way to the publisher, which settles with that
        session.runs.pop(entry, None)
        if made is None or made.choices:
            session.settle(Aborted(entry, charged, made))

    def _note_deadline(self, session: LaneSession, entry: str, deadline_ms: int) -> None:
        runs = session.runs
        if len(self._deadlines) > LEAST_CLEARED + 2 * len(runs):  # most have ended since
            self._deadlines = [item for item in self._deadlines if item[1] in runs]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (session.broker_time.to_monotonic(deadline_ms), entry))

    def _expire(self) -> None:
        """End the requests whose deadlines have passed, with the tokens made so far."""
        while self._deadlines and self._deadlines[0][0] <= clock.monotonic():
            _, entry = heapq.heappop(self._deadlines)
            if self._session and entry in self._session.runs:
                self._held.pop(entry, None)
                made = self.engine.take_out(entry)
                has_begun = made is not None and any(one.tokens for one in made.choices)
                where = "running" if has_begun else "on the worker's lane"
                self._put([Expired(entry, made, where)])

    def _note_made(self) -> None:
        """Once a second, as it is reported: whole answers show nothing before their end."""
        now = clock.monotonic()
        if self._session and now >= self._note_made_at:
            self._note_made_at = now + PROGRESS_EVERY_S
            self._session.note_made(self.engine.progress())

    def _put(self, events: Sequence[Outcome]) -> None:
        if self._session and events:
            self._session.put(events, self.epoch)

    def _end_session(self) -> None:
        """Drop the requests of the current incarnation: another one will finish them."""
        session, self._session = self._session, None
        self._deadlines.clear()
        self._held.clear()
        if session is None:
            return
        session.end()
        self.engine.abort(list(session.runs))
