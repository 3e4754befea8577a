"""One process of the pool: its state, its memory, and its worker in the yard.

A `WorkerProcessHandle` decides nothing about models or Redis: the pool gives it commands and reads
its state. Processes come from the host's fork-server, which has imported the engine and holds no
device, so no CUDA context is ever inherited.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

from tokenyard import clock
from tokenyard.broker.outage import Backoff
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.scripts.answers import Why
from worker import messages
from worker.engines import EngineInfo, RankGroup
from worker.host import fork_server
from worker.host.diagnosis import FailedStart
from worker.host.fork_server import CoreHandle
from worker.host.leak import MemoryHistory, Verdict
from worker.host.output import Output
from worker.host.process_state import AWAKE, CHANGING, SERVING, ObservedState, State
from worker.models import ModelSpec
from worker.process.main import main

log = logging.getLogger("tokenyard.worker.pool")

#: Earlier incarnations that are remembered, for commands that were given to one of them.
MOST_FORMER = 100
#: A core that has told its front why it ends has ended after this time.
_CORE_S: Final = 2.0


class WorkerProcessHandle:
    """One process of the pool."""

    def __init__(self, settings: WorkerSettings, name: str, device: int) -> None:
        self.name = name
        self.device = device
        self.state = State.DOWN
        self.start_at = 0.0  # monotonic
        self.since = clock.wall()  # of its state
        self.phases_s: Mapping[str, float] = {}  # of the last timed change of state
        self.is_last = False  # no process follows this one
        self.last_error = ""  # of its process or its engine
        self.last_error_ms = 0  # unix time of that
        self._settings = settings
        self._backoff = RestartBackoff(settings.backoff_s, settings.max_backoff_s)
        self._started = 0.0
        self._heartbeat = messages.Heartbeat(0, 0)
        self._moved = 0.0  # when it last made progress, or had no work
        self._entered = 0.0  # its state, monotonic
        self._forget_process()

    def _forget_process(self) -> None:
        """Set what is known of a process to what holds before it starts."""
        settings = self._settings
        self.process: BaseProcess | None = None
        #: Has the device and the model, if the engine is vLLM; `process` is its front.
        self.core: CoreHandle | None = None
        self._weights = ""  # that it was asked to load
        self.pipe: Connection | None = None
        self.output: Output | None = None
        self._their_output: Connection | None = None  # our copy of what the processes write to
        self.memory = MemoryHistory(settings.leak_tolerance, settings.leak_floor_mib)
        self.spec: ModelSpec | None = None  # the model that it holds or is about to
        self.group: RankGroup | None = None
        self.engine: EngineInfo | None = None
        self.worker = ""  # its incarnation in the yard; "" for none
        self.former: deque[str] = deque(maxlen=MOST_FORMER)  # its earlier incarnations
        self.served = ""  # the incarnation whose lane it serves
        self.has_released_lane = False  # that incarnation must leave the yard
        self.observed = ObservedState()
        self.tally = WorkerTotals()  # what its incarnation has published
        self.last_words = ""  # what it said of its end, or why it was killed
        self.exit_cause: Why | None = None  # overrides what its exit status says
        self.sleep_level = 0  # for its next sleep; 0: the model's own
        self.is_retiring = False  # it ends once it is idle

    def __repr__(self) -> str:
        model = f" {self.spec.name}" if self.spec else ""
        return f"<{self.name} {self.state.value}{model}>"

    # Commands of the pool

    def start(self) -> FailedStart | None:
        """Start a process, which warms up.

        If that fails, returns why, and the next try is due after a pause.
        """
        output, self._their_output = fork_server.Pipe(duplex=False)
        self.output = Output(output)
        self._started = clock.monotonic()
        try:
            if self._settings.engine == "vllm":
                self.core = CoreHandle(self._settings, self.name, self.device, self._their_output)
            self._start_front(self._their_output)
        except (EOFError, OSError) as error:
            # The fork-server, or the process that it had just started, was killed.
            log.warning("%s: no process could be started: %s", self.name, error)
            self._end_core()
            self._close_output()
            pause_s = self._backoff.died(was_healthy=False, was_serving=False)
            self.start_at = clock.monotonic() + pause_s
            return FailedStart("warming up", said=f"{type(error).__name__}: {error}")
        self._enter(State.WARMING)
        log.info("%s: process %s starts", self.name, self.pid)
        return None

    def _start_front(self, output: Connection, *, is_adopting: bool = False) -> None:
        pipe, theirs = fork_server.Pipe()
        address = self.core.address if self.core else ""
        level = log.getEffectiveLevel()
        arguments = (self._settings, self.device, level, theirs, output, address, is_adopting)
        process = fork_server.ForkedProcess(target=main, args=arguments, name=self.name)
        try:
            process.start()
        except (EOFError, OSError):
            pipe.close()
            raise
        finally:
            theirs.close()
        self.pipe, self.process = pipe, process

    @property
    def says_why_it_ends(self) -> bool:
        """Whether its core could not start, as it cannot: it says why, and ends."""
        status = self.core.exit_status() if self.core else None
        return self.state is State.WARMING and status is not None and status > 0

    @property
    def may_adopt(self) -> bool:
        """Whether its process was killed, and a new one can take the core over."""
        status = self._exit_status()
        is_killed = status is not None and status < 0 and self.exit_cause is None
        is_there = self.core is not None and self.core.process.is_alive() and self.spec is not None
        serves = self.state in (*SERVING, State.LOADING) and not (self.is_retiring or self.is_last)
        return is_killed and is_there and serves and not self.last_words

    def adopt(self) -> bool:
        """Start a new process for the core, which has its model; False where none can start."""
        if self.spec is None or self.output is None or self._their_output is None:
            return False
        self._forget_front()
        self.output.begin_again()
        try:
            self._start_front(self._their_output, is_adopting=True)
        except (EOFError, OSError) as error:
            log.warning("%s: no process could be started: %s", self.name, error)
            return False
        self.worker, self.served = "", ""
        self.observed = self.observed.without_engine()
        self.load(self.spec, self.group, self._weights)
        return True

    def _forget_front(self) -> None:
        """Close what belongs to a dead front."""
        if self.process is not None:
            self.process.close()
        if self.pipe is not None:
            self.pipe.close()
        self.process, self.pipe = None, None

    def _end_core(self) -> None:
        """Kill the core, if there is one."""
        core, self.core = self.core, None
        if core is not None:
            core.end()

    def _close_output(self) -> None:
        """Pass the last lines on; whoever still writes is dead."""
        if self._their_output is not None:
            self._their_output.close()
        if self.output is not None:
            self.output.pass_on()
            self.output.close()
        self.output, self._their_output = None, None

    def load(self, spec: ModelSpec, group: RankGroup | None = None, weights: str = "") -> None:
        """Load a model, with these weights; as a rank of ``group`` if there is one."""
        self.spec, self.group, self._weights = spec, group, weights
        self.send(messages.LoadModel(spec, group, weights))
        self._enter(State.ATTACHED if group and group.rank else State.LOADING)

    def drain(self) -> None:
        """Finish running requests and take no more."""
        self.send(messages.Drain())
        self._enter(State.DRAINING)

    def unload(self) -> None:
        """Unload the model."""
        self.send(messages.Unload())
        self._enter(State.UNLOADING)

    def fall_asleep(self, level: int) -> None:
        """Release the device but keep the model."""
        self.send(messages.Sleep(level))
        self._enter(State.UNLOADING)

    def wake(self) -> None:
        """Take the device again."""
        self.send(messages.Wake())
        self._enter(State.LOADING)

    def send(self, command: messages.ToProcess) -> None:
        """Send a command; does nothing if the process is dead, which its sentinel reports."""
        if self.pipe is None:
            return
        try:
            self.pipe.send(command)
        except OSError:
            log.debug("%s: pipe is gone", self.name)

    def kill(self) -> None:
        """Kill the process; its sentinel reports the rest."""
        if self.process is not None:
            self.process.kill()
        if self.core is not None:
            self.core.process.kill()

    def replace(self) -> None:
        """Kill the process for a new one, without a pause: it has not failed."""
        self.last_words = "replaced"
        self.exit_cause = "left"
        self.kill()

    # Messages of the process

    def receive(self) -> list[messages.ToController]:
        """The messages since the last call."""
        received: list[messages.ToController] = []
        try:
            while self.pipe is not None and self.pipe.poll():
                received.append(self.pipe.recv())
        except (EOFError, OSError):
            self.pipe = None
        return received

    def warm(self, message: messages.Warm) -> None:
        """It holds no model."""
        self.memory.note_warm(message.memory)
        self.phases_s = message.phases_s
        self.engine, self.spec, self.group, self.sleep_level = None, None, None, 0
        self.observed, self.served = self.observed.without_engine(), ""
        self.tally = WorkerTotals()
        self._enter(State.WARM)

    def ready(self, message: messages.Ready) -> None:
        """The engine is up."""
        self.memory.note_loaded(message.memory)
        self.engine = message.info
        self.phases_s = message.info.phases_s
        self.observed.weights = message.info.weights
        self.sleep_level = 0
        self._enter(State.READY)

    def asleep(self, message: messages.Asleep) -> None:
        """The engine sleeps."""
        self.memory.now, self.phases_s = message.memory, {"sleep": message.seconds}
        self.served = ""
        self._enter(State.ASLEEP)

    def drained(self) -> None:
        """No request is left."""
        if self.state is State.DRAINING:
            self._enter(State.DRAINED)

    def refused(self) -> None:
        """It could not load or sleep, and is as it was before."""
        if self.state is State.LOADING:
            self.spec, self.group, self.engine = None, None, None
            self._enter(State.WARM)
        elif self.state is State.UNLOADING:
            self._enter(State.DRAINED)

    def note_heartbeat(self, heartbeat: messages.Heartbeat) -> None:
        """The process is alive; ``heartbeat`` shows whether it makes progress."""
        if heartbeat.progress != self._heartbeat.progress or not heartbeat.unfinished:
            self._moved = clock.monotonic()
        if heartbeat.error != self._heartbeat.error:
            self.note_error(heartbeat.error)
        self.tally = heartbeat.tally
        self._heartbeat = heartbeat

    def note_error(self, error: str) -> None:
        """Keep an error for operators to see, until the next one."""
        if error:
            self.last_error, self.last_error_ms = error, clock.wall_ms()

    def excuse(self, seconds: float) -> None:
        """Ignore a time in which nobody read the messages of the process."""
        now = clock.monotonic()
        self._moved = min(now, self._moved + seconds)
        self._entered = min(now, self._entered + seconds)

    # Queries

    @property
    def model(self) -> str:
        """The name of the model that it holds or is about to; "" for none."""
        return self.spec.name if self.spec else ""

    @property
    def devices(self) -> tuple[int, ...]:
        """Its device, or those of its group."""
        return self.group.devices if self.group else (self.device,)

    @property
    def pid(self) -> int:
        """The process id; 0 if none runs."""
        return (self.process.pid or 0) if self.process else 0

    @property
    def lived_s(self) -> float:
        """Seconds since its process was started."""
        return clock.monotonic() - self._started

    @property
    def is_awake(self) -> bool:
        """Whether it takes up its device."""
        return self.state in AWAKE

    def is_mate_of(self, other: WorkerProcessHandle) -> bool:
        """Whether both belong to the same group."""
        return bool(self.group and other.group and self.group.address == other.group.address)

    @property
    def is_overdue(self) -> bool:
        """Whether it has been draining for too long."""
        drained_s = clock.monotonic() - self._entered
        return self.state is State.DRAINING and drained_s > self._settings.drain_timeout_s

    @property
    def leak(self) -> Verdict:
        """Whether it leaks; known only while it is warm."""
        return self.memory.verdict if self.state is State.WARM else Verdict.SOUND

    @property
    def is_in_crash_loop(self) -> bool:
        """Whether its processes die again and again."""
        return self.state is State.DOWN and self._backoff.is_crash_loop

    @property
    def kill_reason(self) -> str:
        """Why the process hangs and should be killed, or ""."""
        quiet_s = clock.monotonic() - self._moved
        if self.state in CHANGING and quiet_s > self._settings.start_timeout_s:
            return f"still {self.state.value} after {quiet_s:.0f} s"
        changing_s = clock.monotonic() - self._entered
        if self.state in CHANGING and changing_s > self._settings.load_timeout_s:
            return f"still {self.state.value} after {changing_s:.0f} s (load_timeout_s)"
        if self.state in SERVING and quiet_s > self._settings.hang_timeout_s:
            waiting = self._heartbeat.unfinished
            return f"no progress for {quiet_s:.0f} s while {waiting} requests wait"
        return ""

    # The end of the process

    def failed_start(self) -> FailedStart | None:
        """Why the process died, or could not load its model, before it was of use; else None."""
        if self.exit_cause == "left" or self.state not in (State.WARMING, State.LOADING):
            return None
        status = self._exit_status()
        if self.output is not None:
            self.output.pass_on()
        is_killed = status is not None and status < 0 and not self.last_words
        return FailedStart(
            "warming up" if self.state is State.WARMING else "loading the model",
            signal=_signal_name(-status) if is_killed and status else "",
            status=status,
            said=self.last_words,
            output=self.output.lines if self.output else (),
            crash=self.output.crash if self.output else (),
            model=self.spec.path if self.spec else "",
        )

    def why_exited(self) -> tuple[Why, str]:
        """How the dead process ended: the cause for the yard, and the reason in words."""
        status = self._exit_status()
        words = f": {self.last_words}" if self.last_words else ""
        if status == UNKNOWN_STATUS and _is_alive(self.pid):
            return self.exit_cause or "lost", f"its fork-server is gone{words}"
        if status is None or status >= 0:
            return self.exit_cause or "crashed", f"exit status {status}{words}"
        is_killed = -status in _KILLS and not self.last_words
        cause: Why = "lost" if is_killed else "crashed"
        return self.exit_cause or cause, f"ended by {_signal_name(-status)}{words}"

    def _exit_status(self) -> int | None:
        """The status of a process that is dead or about to be; None if there is none.

        Where its core is dead, that was first: its status counts.
        """
        if self.process is None:
            return None
        self.process.join()
        status = self.process.exitcode
        if self.core is None or status is None:
            return status
        return self.core.exit_status(_CORE_S if status >= 0 else 0.0) or status

    def reap(self) -> None:
        """Clean up after a dead process and plan the next start."""
        if self.process is not None and self._exit_status() == UNKNOWN_STATUS:
            with contextlib.suppress(ProcessLookupError):  # it may only look dead
                os.kill(self.pid, signal.SIGKILL)
        self._end_core()
        self._forget_front()
        self._close_output()
        is_replaced = self.exit_cause == "left"
        # A process that dies in a long warm-up has not been healthy.
        was_healthy = self.memory.baseline is not None and self.lived_s > HEALTHY_S
        pause_s = self._backoff.died(was_healthy=was_healthy, was_serving=self.state in SERVING)
        if is_replaced:
            self._backoff.reset()
            pause_s = 0.0
        self._forget_process()
        self._enter(State.STOPPED if self.is_last else State.DOWN)
        self.start_at = clock.monotonic() + pause_s

    def set_worker(self, worker: str) -> None:
        """Set its incarnation in the yard; "" for none."""
        if self.worker:
            self.former.append(self.worker)
        self.worker = worker

    def stopped(self) -> None:
        """No further process will be started."""
        self._enter(State.STOPPED)

    def _enter(self, state: State) -> None:
        if state is not self.state:
            self.since = clock.wall()
        self.state = state
        self._moved = self._entered = clock.monotonic()
        self._heartbeat = messages.Heartbeat(0, 0, error=self._heartbeat.error)


#: The status that multiprocessing reports when the fork-server can no longer say how it ended.
UNKNOWN_STATUS: Final = 255
#: Signals that come from outside, such as the kernel's when memory runs out.
_KILLS: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_name(number: int) -> str:
    """``SIGKILL`` and so on; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The pause before a dead worker process is started again.

#: A process that lived this long before it died resets the count of failures.
HEALTHY_S: Final = 60.0
#: After this many deaths in a row the process is shown as failed while it pauses.
CRASH_LOOP: Final = 5
#: This many deaths in a row while serving cost only the shortest pause: the search for a request
#: that kills engines takes several, and other requests wait meanwhile.
MOST_IN_SERVICE: Final = 10


class RestartBackoff:
    """Pauses that grow with each failure in a row."""

    def __init__(self, base_s: float, cap_s: float) -> None:
        self._backoff = Backoff(cap=cap_s, base=base_s)
        self._failures = 0
        self._deaths_in_service = 0  # in a row

    @property
    def is_crash_loop(self) -> bool:
        """Whether the last starts all failed."""
        return self._failures >= CRASH_LOOP

    def reset(self) -> None:
        """Forget the failures: the process was replaced on purpose."""
        self._failures = 0

    def died(self, *, was_healthy: bool, was_serving: bool) -> float:
        """The pause in seconds after a death, or after a start that failed."""
        if was_healthy:
            self._deaths_in_service = 0
            self._failures = 1
        elif was_serving and self._deaths_in_service < MOST_IN_SERVICE:
            self._deaths_in_service += 1
            self._failures = 1
        else:
            self._failures += 1
        return self._backoff.compute(self._failures)
