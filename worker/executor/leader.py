"""The leader of a group: an executor for vLLM's engine, with rank 0 in its process and thread."""

from __future__ import annotations

import contextlib
import io
import pickle
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import cloudpickle  # type: ignore[import-untyped]  # vLLM brings it
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import AsyncModelRunnerOutput

from tokenyard import clock
from worker.engines import RankGroup, Unsupported
from worker.engines.stopwatch import Stopwatch
from worker.engines.vllm.executor import DEFAULT_KV_CACHE_BYTES, at_most_for_all
from worker.executor.leader_link import GATHER_S, LeaderLink
from worker.executor.messages import Build, Built, GroupError, Join, Joined
from worker.executor.rank import Plan, Rank, shared_environment
from worker.executor.rpc import PendingRpc, RpcChannel, Segments

LOAD_S: Final = 7200.0  # until the slowest rank has loaded, including a download
HEALTH_S: Final = 10.0


class GroupExecutor(Executor):
    """Runs rank 0 in this process and calls the followers for the other ranks.

    Each call goes to the followers first, because rank 0's part may wait for theirs.
    """

    supports_pp = True
    _group: ClassVar[RankGroup]
    _link: ClassVar[LeaderLink]
    formed: ClassVar[GroupExecutor | None] = None  # the instance that vLLM made

    @classmethod
    def release(cls) -> None:
        """Dismiss the followers, with or without an engine; idempotent."""
        if cls.formed is not None:
            cls.formed.shutdown()
        cls._link.dismiss()
        cls._link.close()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Always true: outputs of rank 0 are fetched on demand."""
        return True

    def _init_executor(self) -> None:
        self._stopwatch = Stopwatch()
        self.phases_s = self._stopwatch.phases_s  # for `with_inner_phases`
        self._rank: Rank | None = None
        self._calls: RpcChannel | None = None
        self._segments: Segments | None = None
        self._mark = uuid.uuid4().hex
        # vLLM names shared memory after the last part: the file (0.32), or the text after the last
        # colon (0.26). Both must be free of slashes.
        self._meeting = Path(f"{self._group.address}:{self._mark}")
        self._output_rank = 0
        self._check_config()
        type(self).formed = self
        try:
            self._form()
        except BaseException:
            self.shutdown()
            raise

    def _check_config(self) -> None:
        parallel = self.parallel_config
        if parallel.world_size != self._group.size:
            raise ValueError(
                f"this model takes {parallel.world_size} ranks (tensor_parallel_size"
                f" {parallel.tensor_parallel_size}, pipeline_parallel_size"
                f" {parallel.pipeline_parallel_size}), and the group has {self._group.size}"
            )
        transfer = (self.vllm_config.kv_transfer_config, self.vllm_config.ec_transfer_config)
        if parallel.data_parallel_size > 1 or any(config is not None for config in transfer):
            raise Unsupported(
                "a group of warm processes supports neither data parallelism nor KV or encoder"
                ' transfer; use vLLM\'s own executor "mp" in the engine arguments'
            )
        media = self.model_config.multimodal_config
        if media is not None and media.mm_processor_cache_type == "shm":
            raise Unsupported('a group needs mm_processor_cache_type "lru"')

    def _form(self) -> None:
        """Gather the followers and load the model with them."""
        link, stages = self._link, self.parallel_config.pipeline_parallel_size
        self._calls = calls = RpcChannel(self._group.size, stages)
        plan = Plan(
            self.vllm_config,
            self._group.devices,
            f"file://{self._meeting}",
            shared_environment(),
            calls.handle,
        )
        orders = Build(_pack(plan))
        self._rank = rank = Rank(plan, 0)
        with self._stopwatch.phase("device"):
            rank.build()
        with self._stopwatch.phase("group"):
            link.gather(GATHER_S)
            link.tell(orders)
            link.await_all(Built, GATHER_S)
            link.tell(Join())
        with self._watched():
            with self._stopwatch.phase("device"):
                rank.meet()
            with self._stopwatch.phase("weights"):
                rank.load()
        with self._stopwatch.phase("group"):
            joined = link.await_all(Joined, LOAD_S)
        self._segments = Segments(self._mark)
        calls.connect({rank: message.answers for rank, message in joined.items()})
        link.when_broken(calls.wake)
        tensor_ranks = self.parallel_config.tensor_parallel_size
        context_ranks = self.parallel_config.prefill_context_parallel_size
        # The first rank of the last stage returns the tokens.
        self._output_rank = self._group.size - tensor_ranks * context_ranks

    def determine_available_memory(self) -> list[int]:
        """Bytes for the KV cache of each rank; on a CPU as in `ThriftyExecutor`."""
        with self._stopwatch.phase("kv cache"):
            available = super().determine_available_memory()
        asked = self.cache_config.kv_cache_memory_bytes
        if current_platform.is_cpu() and asked == DEFAULT_KV_CACHE_BYTES:
            return at_most_for_all(self, available)
        return available

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocate the KV cache of every rank, and warm the ranks up."""
        with self._stopwatch.phase("kv cache"):
            super().initialize_from_config(kv_cache_configs)
        if current_platform.is_cpu() and self.parallel_config.pipeline_parallel_size > 1:
            # Without compilation the CPU worker has no warm-up, and then a later stage has no
            # buffer for the output of the earlier one.
            self.execute_dummy_batch()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Run a method on every rank; returns a list of outputs, or the output of one rank.

        ``timeout`` (seconds) is for the followers' answers; it does not interrupt rank 0. Raises
        rank 0's errors, `GroupError` if a follower fails or dies, and `TimeoutError`.
        """
        if self._calls is None or self._rank is None:
            raise GroupError("the group has been released")
        self._link.check()
        until = None if timeout is None else clock.monotonic() + timeout
        packed = method if isinstance(method, str) else cloudpickle.dumps(method)
        number = self._calls.send(packed, args, kwargs or {}, unique_reply_rank)
        with self._watched():
            output = self._rank.run(packed, args, kwargs or {})
        fetch = partial(self._fetch, output, number, unique_reply_rank, until)
        pending = PendingRpc(self._calls, fetch)
        return pending if non_block else pending.result()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run one step of the model on all ranks."""
        return self._step("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Sample the tokens of the last step."""
        return self._step("sample_tokens", grammar_output, non_block)

    def take_draft_token_ids(self) -> Any:
        """The tokens that the draft model proposes."""
        timeout = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        rank = self._output_rank
        return self.collective_rpc("take_draft_token_ids", timeout, unique_reply_rank=rank)

    def check_health(self) -> None:
        """Raise the error that broke the group, or `TimeoutError` if a follower is silent."""
        self.collective_rpc("check_health", timeout=HEALTH_S)

    def shutdown(self) -> None:
        """Unload the model on all ranks and wait until all are warm; idempotent."""
        type(self).formed = None
        self._link.dismiss()
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.leave()
        self._link.close()
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()
        # After a failed load the segments still have names.
        segments = self._segments or Segments(self._mark)
        segments.free()
        self._meeting.unlink(missing_ok=True)

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        pending: PendingRpc = self.collective_rpc(
            method,
            envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            (argument,),
            non_block=True,
            unique_reply_rank=self._output_rank,
        )
        pending.add_done_callback(self._check_step)
        return pending if non_block else pending.result()

    def _check_step(self, step: Future[Any]) -> None:
        """Mark the group broken after a failed step: its ranks no longer agree."""
        error = step.exception()
        if error is not None:
            self._link.mark_broken(str(error))

    def _fetch(self, own: Any, number: int, answers: int | None, until: float | None) -> Any:
        if self._calls is None:
            raise GroupError("the group has been released")
        self._link.check()
        with self._watched():
            if isinstance(own, AsyncModelRunnerOutput):
                own = own.get_output()
            if answers is None:
                ranks = range(1, self._group.size)
                return [own, *(self._calls.answer(rank, number, until) for rank in ranks)]
            return own if answers == 0 else self._calls.answer(answers, number, until)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Wrap waits for another rank, to report its death instead of the resulting error."""
        try:
            with self._link.inside():
                yield
        except RuntimeError as error:
            self._link.check(error)
            raise


class _Pickler(pickle.Pickler):
    """Pickles a plan, whose config names a class that exists only in this process.

    Followers get the name "mp" in its place, like processes that vLLM starts itself.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and issubclass(obj, GroupExecutor):
            return str, ("mp",)
        return NotImplemented


def _pack(plan: Plan) -> bytes:
    with io.BytesIO() as packed:
        _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump(plan)
        return packed.getvalue()
