"""Groups: one model over several warm processes of a host.

vLLM takes an `Executor` class and asks it for ranks. Its own one starts a process for each; this
one keeps rank 0 in the process that runs the engine, and finds the other ranks at the group's
address, where warm processes come by themselves. Nothing is started and nothing ends: when the
leader lets go, each process is as warm as it was.

Works with vLLM 0.26 to 0.32. docs/decisions/0011-groups-of-warm-processes.md says why it is so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.engines import Group

if TYPE_CHECKING:
    from worker.executor.leader import GroupExecutor as GroupExecutor

__all__ = ["attend", "executor_for"]


def executor_for(group: Group) -> type[GroupExecutor]:
    """What vLLM takes as ``distributed_executor_backend`` in the process that leads ``group``.

    Followers may come from now on. Whoever asked for it must call `GroupExecutor.release` where
    the engine cannot be made.
    """
    from worker.executor.leader import make_executor

    return make_executor(group)


def attend(group: Group) -> None:
    """Be a rank of ``group`` until its leader lets go; this process then is as warm as before.

    Also where the group never forms, or its model cannot be loaded. Raises `GroupError` where the
    leader dies or is not there, and what vLLM raises where letting go fails: the process must end.
    """
    from worker.executor.follower import follow

    follow(group)
