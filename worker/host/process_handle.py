"""One process of the pool: where it is in its life, and its standing in the yard.

A `WorkerProcessHandle` decides nothing about models or Redis: the pool tells it what to do, and it
says what state it is in. It is started by the host's fork-server, which has imported the engine and
holds no device, so no CUDA context is ever inherited.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from redis.backoff import ExponentialWithJitterBackoff

from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import Tally
from tokenyard.scripts import Why
from worker.engines import EngineInfo, Group, Memory
from worker.host.diagnosis import FailedStart
from worker.host.fork_server import ForkServer
from worker.host.leak import READINGS, LeakRule, MemoryReading, Verdict
from worker.host.output import Output
from worker.host.run_state import ObservedState
from worker.messages import (
    Asleep,
    Attach,
    Drain,
    Heartbeat,
    LoadModel,
    Ready,
    Sleep,
    ToController,
    ToProcess,
    Unload,
    Wake,
    Warm,
)
from worker.models import ModelSpec
from worker.process.main import ProcessArguments, main

log = logging.getLogger("tokenyard.worker.pool")

#: A process that lived so long before it died starts the count of failures anew.
HEALTHY_S = 60.0
#: So many incarnations of a process are remembered; a command is obeyed within a turn or so.
MOST_FORMER = 100
#: So many deaths in a row are a crash loop: it is shown as failed while the longest pause lasts.
CRASH_LOOP = 5
#: Of deaths in service so many in a row cost the shortest pause: the search for a request that
#: kills engines takes some, and whoever was beside it waits.
MOST_IN_SERVICE = 10
#: What multiprocessing says of a process whose fork-server cannot say any more how it ended.
UNKNOWN_STATUS = 255
#: Signals that come from outside the process, such as the kernel's when memory runs out.
KILLS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_server = ForkServer


class State(enum.Enum):
    """Life of a process."""

    DOWN = "down"  # none runs; started again when the pause is over
    WARMING = "warming"  # runs, and pays what needs no model
    WARM = "warm"  # holds no model
    LOADING = "loading"  # a model comes, from its files or from sleep
    READY = "ready"  # the engine is up
    DRAINING = "draining"  # finishes what it has
    DRAINED = "drained"  # has nothing left
    ASLEEP = "asleep"  # the engine has let go of the device
    UNLOADING = "unloading"  # the model goes, or falls asleep
    ATTACHED = "attached"  # lent to the leader of a group
    STOPPED = "stopped"  # ended for good


#: Something is on the device, comes or goes.
AWAKE = frozenset(
    {
        State.LOADING,
        State.READY,
        State.DRAINING,
        State.DRAINED,
        State.UNLOADING,
        State.ATTACHED,
    }
)
#: States in which nothing is to be heard from a process for a bounded time only.
_CHANGING = frozenset({State.WARMING, State.LOADING, State.UNLOADING})
_SERVING = frozenset({State.READY, State.DRAINING})


class WorkerProcessHandle:
    """One process of the pool."""

    def __init__(self, settings: WorkerSettings, name: str, device: int) -> None:
        self.name = name
        self.device = device
        self.state = State.DOWN
        self.worker = ""  # its name in the yard, with incarnation, while it has one
        self.former: deque[str] = deque(maxlen=MOST_FORMER)  # those of its process before that
        self.served = ""  # the incarnation whose lane it has been told to consume
        self.is_spent = False  # that incarnation has let go of its lane, and has to leave
        self.observed = ObservedState()  # what it does of what operators want
        self.spec: ModelSpec | None = None  # what it holds, or is about to
        self.group: Group | None = None
        self.engine: EngineInfo | None = None
        self.process: BaseProcess | None = None
        self.pipe: Connection | None = None
        self.output: Output | None = None
        self.start_at = 0.0  # monotonic
        self.since = time.time()  # when it came into its state
        self.phases_s: Mapping[str, float] = {}  # of the last change of state that took time
        self.memory: Memory | None = None
        self.baseline: Memory | None = None  # when it was warm for the first time
        self.last_words = ""  # what the process said of its end, or why it was killed
        self.end: Why | None = None  # how its end counts where that is known better
        self.sleep_level = 0  # at which it is to sleep when it gives way; 0: as its model says
        self.is_doomed = False  # its process is to end once it has nothing to do
        self.is_last = False  # no process is to follow this one
        self.tally = Tally()  # what it has published under its present name
        self.last_error = ""  # why its process died the last time, or what its engine could not do
        self.last_error_ms = 0  # unix time of that
        self._settings = settings
        self._backoff = ExponentialWithJitterBackoff(
            cap=settings.max_backoff_s, base=settings.backoff_s
        )
        self._failures = 0
        self._deaths_in_service = 0  # in a row
        self._looks: deque[MemoryReading] = deque(
            maxlen=READINGS
        )  # after each unload, the newest last
        self._most = 0  # bytes, with the model that it holds
        self._started = 0.0
        self._drain_since = 0.0
        self._beat = Heartbeat(0, 0)
        self._moved = 0.0  # when progress was last seen, or had no reason to be

    def __repr__(self) -> str:
        model = f" {self.spec.name}" if self.spec else ""
        return f"<{self.name} {self.state.value}{model}>"

    # What the pool tells it to do

    def start(self) -> FailedStart | None:
        """Start a process, which warms up.

        Where that cannot be, the next try is after a pause, and what hinders it is given.
        """
        self.pipe, theirs = _server.Pipe()
        output, their_output = _server.Pipe(duplex=False)
        self.output = Output(output)
        birth = ProcessArguments(self._settings, self.device, log.getEffectiveLevel())
        process = _server.Process(target=main, args=(birth, theirs, their_output), name=self.name)
        self._started = time.monotonic()
        try:
            process.start()
        except (EOFError, OSError) as error:
            # The fork-server, or what it had just started, was killed at this very moment.
            log.warning("%s: no process could be started: %s", self.name, error)
            self.pipe.close()
            self.output.close()
            self.pipe, self.output = None, None
            self._pause(self._failures + 1)
            return FailedStart("warming up", said=f"{type(error).__name__}: {error}")
        else:
            self.process = process
            self._enter(State.WARMING)
            log.info("%s: process %s starts", self.name, process.pid)
            return None
        finally:
            theirs.close()
            their_output.close()

    def load(self, spec: ModelSpec, group: Group | None = None, weights: str = "") -> None:
        """Make an engine, of these weights; as the leader of a group where one is given."""
        self.spec, self.group = spec, group
        self.send(LoadModel(spec, group, weights))
        self._enter(State.LOADING)

    def attach(self, spec: ModelSpec, group: Group) -> None:
        """Lend the process to the leader of a group."""
        self.spec, self.group = spec, group
        self.send(Attach(group))
        self._enter(State.ATTACHED)

    def drain(self) -> None:
        """Finish what runs and take no more."""
        self.send(Drain())
        self._enter(State.DRAINING)

    def unload(self) -> None:
        """Let go of the model."""
        self.send(Unload())
        self._enter(State.UNLOADING)

    def fall_asleep(self, level: int) -> None:
        """Let go of the device, not of the model."""
        self.send(Sleep(level))
        self._enter(State.UNLOADING)

    def wake(self) -> None:
        """Take the device again."""
        self.send(Wake())
        self._enter(State.LOADING)

    def send(self, command: ToProcess) -> None:
        """Tell the process; one that is gone is noticed by its sentinel."""
        if self.pipe is None:
            return
        try:
            self.pipe.send(command)
        except OSError:
            log.debug("%s: pipe is gone", self.name)

    def kill(self) -> None:
        """End the process at once; its sentinel tells the rest."""
        if self.process is not None:
            self.process.kill()

    # What it says

    def receive(self) -> list[ToController]:
        """What the process has said since."""
        messages: list[ToController] = []
        try:
            while self.pipe is not None and self.pipe.poll():
                messages.append(self.pipe.recv())
        except (EOFError, OSError):
            self.pipe = None
        return messages

    def warm(self, message: Warm) -> None:
        """It holds no model (any more)."""
        self._look(message.memory)
        self.memory, self.phases_s = message.memory, message.phases_s
        self.engine, self.spec, self.group, self.sleep_level = None, None, None, 0
        self.observed, self.served = ObservedState(), ""
        self.tally = Tally()
        self._enter(State.WARM)

    def _look(self, memory: Memory) -> None:
        """Note what has stayed behind of a model that has gone, and what it had taken."""
        if self.baseline is None:
            self.baseline = memory
        else:
            before = self._looks[-1].after if self._looks else self.baseline.scarce
            self._looks.append(MemoryReading(memory.scarce, max(0, self._most - before)))
        self._most = 0

    def ready(self, message: Ready) -> None:
        """The engine is up."""
        self._most = max(self._most, message.memory.scarce)
        self.engine, self.memory = message.info, message.memory
        self.phases_s = message.info.phases_s
        self.observed.weights = message.info.weights
        self.sleep_level = 0
        self._enter(State.READY)

    def asleep(self, message: Asleep) -> None:
        """The engine sleeps."""
        self.memory, self.phases_s = message.memory, {"sleep": message.seconds}
        self.served = ""
        self._enter(State.ASLEEP)

    def drained(self) -> None:
        """Nothing is left to do."""
        if self.state is State.DRAINING:
            self._enter(State.DRAINED)

    def refused(self) -> None:
        """What was asked cannot be done: it is as it was before."""
        if self.state is State.LOADING:
            self.spec, self.group, self.engine = None, None, None
            self._enter(State.WARM)
        elif self.state is State.UNLOADING:
            self._enter(State.DRAINED)

    def note_beat(self, beat: Heartbeat) -> None:
        """The process is alive; whether it also gets on is seen from ``beat``."""
        if beat.progress != self._beat.progress or not beat.unfinished:
            self._moved = time.monotonic()
        if beat.error != self._beat.error:
            self.note_error(beat.error)
        self.tally = beat.tally
        self._beat = beat

    def note_error(self, error: str) -> None:
        """Something went wrong that operators should see; kept until the next one."""
        if error:
            self.last_error, self.last_error_ms = error, int(time.time() * 1000)

    def excuse(self, seconds: float) -> None:
        """Time in which nobody listened to the process does not count against it."""
        self._moved = min(time.monotonic(), self._moved + seconds)

    # What is known of it

    @property
    def pid(self) -> int:
        """Of the process; 0 where none runs."""
        return (self.process.pid or 0) if self.process else 0

    @property
    def lived_s(self) -> float:
        """Since its process was started."""
        return time.monotonic() - self._started

    @property
    def is_awake(self) -> bool:
        """Whether it takes up its device."""
        return self.state in AWAKE

    def is_mate_of(self, other: WorkerProcessHandle) -> bool:
        """Whether both belong to the same group."""
        return bool(self.group and other.group and self.group.address == other.group.address)

    @property
    def is_overdue(self) -> bool:
        """Whether it has been draining for longer than it may."""
        drained_s = time.monotonic() - self._drain_since
        return self.state is State.DRAINING and drained_s > self._settings.drain_timeout_s

    @property
    def kept(self) -> int:
        """Bytes that it has beyond its warm memory, when last measured."""
        return self.memory.scarce - self.baseline.scarce if self.memory and self.baseline else 0

    @property
    def leak(self) -> Verdict:
        """Whether the models that it has held have left too much behind."""
        if self.state is not State.WARM or not self.baseline:
            return Verdict.SOUND
        rule = LeakRule(self._settings.leak_tolerance, self._settings.leak_floor_mib)
        return rule.judge(self.baseline.scarce, self._looks)

    @property
    def is_in_crash_loop(self) -> bool:
        """Whether it dies again and again."""
        return self.state is State.DOWN and self._failures >= CRASH_LOOP

    @property
    def fault(self) -> str:
        """Why the process should be killed, or "" while it should not."""
        quiet_s = time.monotonic() - self._moved
        if self.state in _CHANGING and quiet_s > self._settings.start_timeout_s:
            return f"still {self.state.value} after {quiet_s:.0f} s"
        if self.state in _SERVING and quiet_s > self._settings.hang_timeout_s:
            return f"no progress for {quiet_s:.0f} s while {self._beat.unfinished} requests wait"
        return ""

    # Its end

    def death(self) -> FailedStart | None:
        """How the process, which is dead, never came to be of use; None where it was.

        That its model could not be loaded is a death as well, where it said so and lives.
        """
        if self.end == "left" or self.state not in (State.WARMING, State.LOADING):
            return None
        status = None
        if self.process is not None:
            self.process.join()
            status = self.process.exitcode
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

    def departure(self) -> tuple[Why, str]:
        """How the process, which is dead, ended: by itself or by a hand from outside."""
        status = None
        if self.process is not None:
            self.process.join()
            status = self.process.exitcode
        words = f": {self.last_words}" if self.last_words else ""
        if status == UNKNOWN_STATUS and _is_alive(self.pid):
            return self.end or "lost", f"its fork-server is gone{words}"
        if status is None or status >= 0:
            return self.end or "crashed", f"exit status {status}{words}"
        name = _signal_name(-status)
        from_outside = -status in KILLS and not self.last_words
        return self.end or ("lost" if from_outside else "crashed"), f"ended by {name}{words}"

    def bury(self) -> int | None:
        """The process is dead: clean up and plan the next start; its exit status, if it had one."""
        status = None
        if self.process is not None:
            self.process.join()
            status = self.process.exitcode
            # A fork-server that was killed makes its processes look dead that are not.
            with contextlib.suppress(ProcessLookupError):
                if status == UNKNOWN_STATUS:
                    os.kill(self.pid, signal.SIGKILL)
            self.process.close()
        if self.pipe is not None:
            self.pipe.close()
        if self.output is not None:
            self.output.pass_on()
            self.output.close()
        is_replaced = self.end == "left"
        # One that takes long to warm up and dies of it has not been healthy.
        was_healthy = self.baseline is not None and self.lived_s > HEALTHY_S
        failures = self._count_death(was_healthy=was_healthy)
        self.output = None
        self.process, self.pipe, self.engine, self.worker = None, None, None, ""
        self.spec, self.group, self.baseline, self.memory = None, None, None, None
        self._looks.clear()
        self._most = 0
        self.tally = Tally()
        self.last_words, self.end, self.sleep_level, self.is_doomed = "", None, 0, False
        self.observed, self.served, self.is_spent = ObservedState(), "", False
        self.former.clear()
        self._enter(State.STOPPED if self.is_last else State.DOWN)
        if is_replaced:
            self._failures, self.start_at = 0, time.monotonic()
        else:
            self._pause(failures)
        return status

    def _count_death(self, *, was_healthy: bool) -> int:
        """How many deaths in a row this one makes, for the pause before the next start."""
        if was_healthy:
            self._deaths_in_service = 0
            return 1
        if self.state in _SERVING and self._deaths_in_service < MOST_IN_SERVICE:
            self._deaths_in_service += 1
            return 1
        return self._failures + 1

    def _pause(self, failures: int) -> None:
        self._failures = failures
        self.start_at = time.monotonic() + self._backoff.compute(failures)

    def become(self, worker: str) -> None:
        """It has another place in the yard, or "" none."""
        if self.worker:
            self.former.append(self.worker)
        self.worker = worker

    def replace(self) -> None:
        """The process is to be replaced, without a pause: it has done nothing wrong but leak."""
        self.last_words = "replaced"
        self.end = "left"
        self.kill()

    def stopped(self) -> None:
        """Nothing more will be started."""
        self._enter(State.STOPPED)

    def _enter(self, state: State) -> None:
        if state is State.DRAINING:
            self._drain_since = time.monotonic()
        if state is not self.state:
            self.since = time.time()
        self.state = state
        self._moved = time.monotonic()
        self._beat = Heartbeat(0, 0, error=self._beat.error)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_name(number: int) -> str:
    """``SIGKILL`` and so on; most of real time have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
