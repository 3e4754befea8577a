"""Groups: one model over several warm processes of a host.

vLLM takes an `Executor` class and asks it for ranks. Its own one starts a process for each; this
one (`executor_for`) keeps rank 0 in the process that runs the engine and finds the other ranks at
the group's address, where warm processes come by themselves (`attend`). Nothing is started and
nothing ends: when the leader lets go, each process is as warm as it was.

Works with vLLM 0.26 to 0.32. docs/decisions/0011-groups-of-warm-processes.md says why it is so.
"""

from worker.executor.follower import attend
from worker.executor.leader import GroupExecutor, executor_for

__all__ = ["GroupExecutor", "attend", "executor_for"]
