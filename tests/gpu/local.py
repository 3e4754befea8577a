"""A program's own pool on the device: three processes, one of them awake at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.gpu.device import Device
from tests.gpu.specs import GREEDY
from tests.support.waiting import eventually
from tokenyard.protocol.errors import WaitTimeout
from worker import EngineHandle, ProcessStatus, WorkerController

SLEEPERS = 2
PROCESSES = 1 + SLEEPERS
WARM_S = 200.0
WAIT_S = 90.0
AGAIN_S = 90.0
PROMPTS: Sequence[Sequence[int]] = ([4, 5, 14], [100, 7, 300, 21], [9] * 20, list(range(3, 60)))
TOKENS = 24


class Local:
    """A `WorkerController`, and its processes seen from outside."""

    def __init__(self, device: Device, controller: WorkerController) -> None:
        self.device = device
        self.controller = controller
        self.warm_up_s = [dict(one.phases_s) for one in controller.status()]

    def pids(self) -> list[int]:
        """The process ids of the pool."""
        return [one.pid for one in self.controller.status()]

    def used(self) -> int:
        """Bytes of the device that are in use."""
        return self.device.used(self.pids())

    def process(self, state: str, model: str = "") -> ProcessStatus:
        """The process in this state; any one of several."""
        found = [
            one for one in self.controller.status() if (one.state, one.model) == (state, model)
        ]
        assert found, f"no process is {state} {model}: {self.told()}"
        return found[0]

    def is_warm_again(self) -> bool:
        """Whether all processes are warm, after a wait for a killed one."""
        try:
            return bool(
                eventually(self._all_warm, timeout_s=self.device.patience * AGAIN_S, every_s=0.1)
            )
        except AssertionError:
            return False

    def _all_warm(self) -> bool:
        return {one.state for one in self.controller.status()} == {"warm"}

    def told(self) -> str:
        """All processes in words."""
        return "; ".join(map(str, self.controller.status()))

    def wait_used_at_most(self, most: int) -> int:
        """Bytes in use, once they are at most this many: a process frees memory with a delay."""

        def settled() -> int:
            used = self.used()
            over = (used - most) >> 20
            assert used <= most, f"{over} MiB more are in use than should be: {self.told()}"
            return used

        return eventually(settled, timeout_s=20.0, every_s=0.1)


@contextmanager
def running_local(device: Device) -> Iterator[Local]:
    """A pool whose processes are warm."""
    controller = WorkerController(
        sleepers=SLEEPERS,
        device=device.name,
        timeout_s=device.patience * WAIT_S,
        start_timeout_s=device.patience * WARM_S,
        # No process is replaced for memory that a library keeps: the tests compare its memory.
        leak_floor_mib=2048.0,
        leak_tolerance=1.0,
    )
    with controller:
        try:
            controller.wait_warm(device.patience * WARM_S)
        except WaitTimeout as fault:
            told = "; ".join(map(str, controller.status()))
            raise AssertionError(f"{fault}: {told}") from fault
        yield Local(device, controller)


def answers(engine: EngineHandle) -> list[list[int]]:
    """Greedy tokens for a few prompts, one after the other: always in batches of one."""
    found = []
    for prompt in PROMPTS:
        (result,) = engine.generate([prompt], max_tokens=TOKENS, **GREEDY)
        assert result.ok, result.error
        found.append(list(result.tokens))
    return found
