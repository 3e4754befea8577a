"""One rank of a group: a vLLM worker in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.shm_broadcast import Handle
from vllm.platforms import current_platform
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from worker.executor.rpc import unname

_SHARED = ("VLLM_", "TORCHINDUCTOR_", "LOCAL_WORLD_SIZE")
_OWN = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_DIST_IDENT")


@dataclass(frozen=True, slots=True)
class Plan:
    """The data with which every rank builds its worker."""

    config: VllmConfig
    devices: tuple[int, ...]  # by rank
    meeting: str  # the address where torch's process groups connect
    environment: Mapping[str, str]  # variables that the leader's vLLM has read or set
    calls: Handle  # the queue of calls


def shared_environment() -> dict[str, str]:
    """The environment variables that all ranks share."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SHARED) and name not in _OWN
    }


class Rank:
    """This process's part of the model."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._worker: Any = None  # not all its methods have types

    def build(self) -> None:
        """Make the worker, without waiting for other ranks; raises vLLM's errors."""
        config = self._plan.config
        parallel = config.parallel_config
        local_rank = self._rank if current_platform.is_cpu() else self._plan.devices[self._rank]
        arguments: list[dict[str, Any]] = [{} for _ in range(parallel.world_size)]
        arguments[self._rank] = {
            "vllm_config": config,
            "local_rank": local_rank,
            "rank": self._rank,
            "distributed_init_method": self._plan.meeting,
            "is_driver_worker": self._rank % parallel.tensor_parallel_size == 0,
        }
        worker = WorkerWrapperBase(rpc_rank=self._rank, global_rank=self._rank)
        worker.init_worker(arguments)
        self._worker = worker

    def meet(self) -> None:
        """Connect to the other ranks; all must call this at the same time."""
        _reset_group_numbers()
        self._built.init_device()
        # None without tensor parallelism.
        broadcaster = parallel_state.get_tp_group().mq_broadcaster
        if broadcaster is not None:
            unname(broadcaster)

    def load(self) -> None:
        """Load this rank's part of the model."""
        self._built.load_model()
        current_platform.update_block_size_for_backend(self._plan.config)

    def run(self, method: str | bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the worker."""
        return run_method(self._built, method, args, kwargs)

    def leave(self) -> None:
        """Unload the model and disconnect from the other ranks; idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()
        del worker
        leave: Any = parallel_state  # these two have no types
        leave.destroy_model_parallel()
        leave.destroy_distributed_environment()

    @property
    def _built(self) -> Any:
        if self._worker is None:
            raise RuntimeError("the group has been released")
        return self._worker


def _reset_group_numbers() -> None:
    """Reset the numbers in the names of vLLM's process groups.

    vLLM counts groups for the life of a process, and the processes of a pool have been in different
    numbers of groups. The names must agree: the CPU backend names shared memory after them, and
    compiled graphs on disk refer to groups by name.
    """
    numbers: dict[str, int] = getattr(parallel_state, "_group_name_counter", {})
    numbers.clear()
