"""The status of a pool's processes, for its program."""

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
    """One process of a pool at its last change of state."""

    name: str
    device: int
    state: str  # warming, warm, loading, ready, draining, asleep, unloading, attached, failed
    model: str  # that it holds or loads; "" for none
    pid: int  # 0 if no process runs
    phases_s: Mapping[str, float]  # seconds by phase of its last warm-up, load, sleep or wake
    memory: Memory | None  # bytes, measured after that change
    baseline: Memory | None  # bytes when it was first warm
    fault: str  # how the previous process died, until this one is warm

    def __str__(self) -> str:
        memory = f"{self.memory.scarce / _MIB:.0f} MiB" if self.memory else ""
        phases = ", ".join(f"{phase} {took:.2f} s" for phase, took in self.phases_s.items())
        start = f"{self.name:<10} device {self.device}  {self.state:<9}"
        parts = [start, self.model, memory, phases, self.fault]
        return "  ".join(part for part in parts if part).rstrip()


def process_status(member: WorkerProcessHandle, fault: str) -> ProcessStatus:
    """Make the status of a process; ``fault`` is how its predecessor died."""
    is_new = member.state is State.DOWN and not fault  # about to start
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
