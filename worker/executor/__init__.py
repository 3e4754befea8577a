"""Groups: one model across several warm processes of a host.

vLLM's own executor starts a process for each rank. This one keeps rank 0 in the process that runs
the engine; warm processes connect to the group's address and become the other ranks. When the
leader dismisses them, each process is as warm as it was.

Works with vLLM 0.26 to 0.32. docs/decisions/0011-groups-of-warm-processes.md gives the reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.engines import RankGroup

if TYPE_CHECKING:
    from worker.executor.leader import GroupExecutor as GroupExecutor

__all__ = ["attend", "executor_for"]


def executor_for(group: RankGroup) -> type[GroupExecutor]:
    """VLLM's ``distributed_executor_backend`` for the process that leads ``group``.

    Followers may connect from now on. The caller must call `GroupExecutor.release` if the engine
    cannot be made.
    """
    from worker.executor.leader import GroupExecutor
    from worker.executor.leader_link import LeaderLink

    if group.size < 2 or group.rank != 0:
        raise ValueError(f"rank {group.rank} of {group.size} cannot lead a group")
    link = LeaderLink(group)
    link.open()
    return type("GroupExecutor", (GroupExecutor,), {"_group": group, "_link": link})


def attend(group: RankGroup) -> None:
    """Be a rank of ``group`` until its leader dismisses it; the process is then warm again.

    This is also true if the group never forms or the model cannot be loaded. Raises `GroupError` if
    the leader dies or is missing, and vLLM's errors if the unload fails; then the process must end.
    """
    from worker.executor.follower import follow

    follow(group)
