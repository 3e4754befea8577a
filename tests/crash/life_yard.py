"""A yard of models on demand, whose processes a test kills in a chosen state."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

import psutil

from tests.support.hosts import processes
from tests.support.processes import Answer, Plant, Program, is_gone
from tests.support.streams import check_exact, expected, streams
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request
from tokenyard.protocol.worker_info import WorkerInfo, WorkerState

#: Longest wait for one event, on a busy machine.
WAIT_S = 60.0
STEP_S = 0.02
#: Short, so that a test need not wait for a swap among busy models.
MAX_MODEL_WAIT_S = 0.3
#: States in which a process rests.
AT_REST: frozenset[WorkerState] = frozenset({"warm", "ready", "asleep", "attached"})

MODELS = """
[defaults]
max_num_seqs = 8

[models.red]
path = "red"

[models.blue]
path = "blue"

[models.pair]
path = "pair"
tensor_parallel_size = 2

[models.torn]
path = "broken"
"""


class LifeYard(Plant):
    """A plant that remembers its requests and the processes that the test has killed."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.wait_s = WAIT_S
        self.asked: list[Request] = []
        self.killed: set[int] = set()

    def start(self, **options: object) -> Program:
        """Start a coordinator and one host; return the host once all its processes are warm."""
        self.coordinator(max_model_wait_s=MAX_MODEL_WAIT_S)
        host = self.pool(**options)
        eventually(
            lambda: self.states(host) == ["warm"] * processes(options), timeout_s=self.wait_s
        )
        return host

    def pool(self, **options: object) -> Program:
        """Start a host that may load all `MODELS`."""
        models = self.write("models.toml", MODELS)
        return self.host(models, **{"simulated_step_s": STEP_S, **options})

    # Requests

    def ask(self, model: str, count: int = 4, max_tokens: int = 60) -> list[Request]:
        """Submit streams for a model; `check_all` expects them to complete."""
        asked = self.make(model, count, max_tokens)
        self.push_all(asked)
        self.asked += asked
        return asked

    def make(self, model: str, count: int, max_tokens: int) -> list[Request]:
        """Streams for a model, whose tokens are `expected`."""
        return streams(count, max_tokens, model=model)

    def expected(self, request: Request) -> list[int]:
        """All tokens of an undisturbed request."""
        return expected(request)

    def flow(self, model: str, count: int = 4, max_tokens: int = 150) -> list[Request]:
        """Submit streams for a model, and wait until they are in mid-stream."""
        asked = self.ask(model, count, max_tokens)
        eventually(
            lambda: all(self.published(request.id) >= 3 for request in asked), timeout_s=self.wait_s
        )
        return asked

    def check_all(self) -> dict[str, Answer]:
        """Check that each request's own model answered with every token once; answers by id."""
        self.results(self.asked, timeout_s=self.wait_s)
        answers = check_exact(self, self.asked, self.expected)
        for request, answer in zip(self.asked, answers, strict=True):
            assert answer.result.provenance
            assert answer.result.provenance.model == request.model
        return {request.id: answer for request, answer in zip(self.asked, answers, strict=True)}

    # Processes

    def seen(self, state: WorkerState, model: str = "", but: Collection[int] = ()) -> WorkerInfo:
        """Wait for a process in this state, other than the pids in ``but``."""

        def found() -> list[WorkerInfo]:
            return [
                info
                for info in self.roster().values()
                if (info.state, info.model) == (state, model) and info.pid not in but
            ]

        return eventually(found, timeout_s=self.wait_s, every_s=0.002)[0]

    def pid_of(self, state: WorkerState, model: str = "") -> int:
        """The pid of the one process in this state."""
        (info,) = (
            one for one in self.roster().values() if (one.state, one.model) == (state, model)
        )
        return info.pid

    def states(self, host: Program) -> list[str]:
        """The states of a host's processes; empty unless the roster shows exactly them."""
        infos = list(self.roster().values())
        alive = {process.pid for process in host.children()}
        are_all = {info.pid for info in infos} == alive and len(infos) == len(alive)
        return sorted(info.state for info in infos) if are_all else []

    def kill(self, pid: int) -> None:
        """Send SIGKILL to one process, and wait until it is dead."""
        os.kill(pid, signal.SIGKILL)
        self.killed.add(pid)
        eventually(lambda: is_gone(pid), timeout_s=self.wait_s)

    def check_whole(self, host: Program, count: int) -> None:
        """Wait until so many live processes rest and no killed one is shown."""

        def whole() -> bool:
            states = self.states(host)
            shown = {info.pid for info in self.roster().values()}
            return len(states) == count and set(states) <= AT_REST and not shown & self.killed

        eventually(whole, timeout_s=self.wait_s)

    def stalled(self) -> set[int]:
        """The pids of processes that have stopped themselves during warm-up."""
        warming = {info.pid for info in self.roster().values() if info.state == "warming"}
        return {pid for pid in warming if _is_stopped(pid)}


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:  # the roster shows it a little later
        return False
