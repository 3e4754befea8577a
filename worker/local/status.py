"""What a program is told of the processes of its pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.engines import Memory
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.host.roster_entry import roster_entry

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process of a pool, as it was when it last came into another state."""

    name: str
    device: int
    state: str  # warming, warm, loading, ready, draining, asleep, unloading, attached, failed
    model: str  # that it holds, or is about to; "" for none
    pid: int  # 0 where none runs
    phases_s: Mapping[str, float]  # of the last change of state that took time
    memory: Memory | None  # bytes, measured with that change
    baseline: Memory | None  # the same when it was warm for the first time
    fault: str  # how its last process died, while the next is not warm yet

    def __str__(self) -> str:
        memory = f"{self.memory.scarce / _MIB:.0f} MiB" if self.memory else ""
        phases = ", ".join(f"{phase} {took:.2f} s" for phase, took in self.phases_s.items())
        start = f"{self.name:<10} device {self.device}  {self.state:<9}"
        parts = [start, self.model, memory, phases, self.fault]
        return "  ".join(part for part in parts if part).rstrip()


def process_status(member: WorkerProcessHandle, fault: str) -> ProcessStatus:
    """What to tell of a process; ``fault`` is how the one before it died."""
    is_new = member.state is State.DOWN and not fault  # it is about to be started
    return ProcessStatus(
        name=member.name,
        device=member.device,
        state="warming" if is_new else roster_entry(member, "", [], 0).state,
        model=member.spec.name if member.spec else "",
        pid=member.pid,
        phases_s=dict(member.phases_s),
        memory=member.memory.now,
        baseline=member.memory.baseline,
        fault=fault,
    )
