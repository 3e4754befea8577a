"""The roster entry of a process."""

from __future__ import annotations

import os
import socket

from tokenyard import clock
from tokenyard.protocol.worker_info import WorkerInfo, WorkerState
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State

_SHOWN: dict[State, WorkerState] = {
    State.WARMING: "warming",
    State.WARM: "warm",
    State.LOADING: "loading",
    State.READY: "ready",
    State.DRAINING: "draining",
    State.DRAINED: "draining",
    State.ASLEEP: "asleep",
    State.UNLOADING: "unloading",
    State.ATTACHED: "attached",
}


def lane_limit(max_num_seqs: int) -> int:
    """Most entries on a lane: what its engine runs at once and a quarter more, read ahead."""
    return max_num_seqs + max(1, max_num_seqs // 4)


def roster_entry(
    member: WorkerProcessHandle, controller: str, group: list[str], swapped_ms: int
) -> WorkerInfo:
    """The roster entry; the engine's fields are empty while there is none."""
    engine = member.engine
    max_num_seqs = engine.max_num_seqs if engine else 1
    return WorkerInfo(
        name=member.name,
        state=_SHOWN.get(member.state, "failed"),
        model=member.model,
        revision=engine.revision if engine else "",
        engine=engine.engine if engine else "",
        engine_version=engine.engine_version if engine else "",
        host=socket.gethostname(),
        pid=member.pid or os.getpid(),
        max_num_seqs=max_num_seqs,
        lane_limit=lane_limit(max_num_seqs),
        max_model_len=engine.max_model_len if engine else 0,
        vocab_size=engine.vocab_size if engine else 0,
        tokenizer=engine.tokenizer if engine else "",
        started_ms=int((clock.wall() - member.lived_s) * 1000),
        phases_s={phase: round(seconds, 4) for phase, seconds in member.phases_s.items()},
        controller=controller,
        device=member.device,
        adapters=list(engine.adapters) if engine else [],
        group=group,
        since_ms=int(member.since * 1000),
        swapped_ms=swapped_ms,
        memory_bytes=member.memory.now.scarce if member.memory.now else 0,
        warm_bytes=member.memory.baseline.scarce if member.memory.baseline else 0,
        run_state=member.observed.run_state,
        epoch=member.observed.epoch,
        weights=member.observed.weights,
        obeyed=member.observed.obeyed,
        tally=member.tally,
        last_error=member.last_error,
        last_error_ms=member.last_error_ms,
        cache_tokens=engine.cache_tokens if engine else 0,
        core_pid=member.core.process.pid or 0 if member.core else 0,
        tasks=list(engine.tasks) if engine else [],
    )
