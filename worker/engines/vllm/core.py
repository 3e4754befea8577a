"""What needs the device: weights, KV cache, scheduler and sampler of one model.

It is vLLM's `EngineCore` with what the worker does to it. A *front* (`VllmEngine`) in another
process makes requests and reads outputs; `worker.engines.vllm.core_link` is between both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm import PoolingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from tokenyard import clock
from tokenyard.protocol.wire import SamplingParams
from worker.engines.checkpoints import check_fit
from worker.engines.device import DeviceLock
from worker.engines.stopwatch import Stopwatch
from worker.engines.vllm import sleep
from worker.engines.vllm.arguments import engine_config, folder_of, lora_requests
from worker.engines.vllm.executor import EXECUTOR, with_inner_phases
from worker.engines.vllm.grammars import GrammarLimits, GrammarThreads
from worker.engines.vllm.params import build_params
from worker.engines.vllm.warm_base import held_back, keep_allocators, let_go
from worker.models import ModelSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request

_WARM_UP: Final = "tokenyard-warm-up"
#: Pause between steps while all requests wait for their grammars.
_COMPILING_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class CoreInfo:
    """What a front must know of its core."""

    config: VllmConfig
    adapters: Mapping[str, LoRARequest]
    phases_s: Mapping[str, float]
    weights: str


class Core:
    """One model on the device. One thread owns it, but for `preprocess`."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: int,
        executor: type[Executor] | None,
        weights: str,
        lock: DeviceLock,
        log_stats: bool,
        grammars: GrammarLimits,
    ) -> None:
        """Load the model and run it once; see `engine_config` for the arguments.

        Sleep, wake and unload take ``lock``, which other processes of the device share; the caller
        must hold it during the load. Raises vLLM's errors if the model cannot be loaded (`let_go`
        cleans up after them), and `Unsupported` for weights that do not fit.
        """
        if weights:
            check_fit(spec.path, weights)
        stopwatch = Stopwatch()
        self.spec = spec
        self.weights = weights
        self._lock = lock
        with stopwatch.phase("config"):
            self.config = engine_config(spec, device, executor, weights)
            self.adapters = lora_requests(spec)
        with stopwatch.phase(EXECUTOR):
            core = EngineCore(self.config, Executor.get_class(self.config), log_stats)
        self._core: EngineCore | None = core
        self._grammars = GrammarThreads(grammars)
        self._grammars.stand_in(core)
        self._keys: dict[str, str] = {}  # lane entries by requests whose grammars are compiled
        self._is_frozen = False
        if self.adapters:
            with stopwatch.phase("adapters"):
                sleep.add_adapters(core, self.adapters)
        with stopwatch.phase("warm-up"):
            self._warm_up()
        self.phases_s = with_inner_phases(stopwatch.phases_s, core.model_executor)

    @property
    def info(self) -> CoreInfo:
        """What a front must know; it can be sent."""
        config = copy(self.config)
        config.parallel_config = parallel = copy(config.parallel_config)
        config.compilation_config = compilation = copy(config.compilation_config)
        parallel.distributed_executor_backend = None  # that of a group cannot be pickled
        compilation.static_forward_context = {}  # the layers, with all of the KV cache
        return CoreInfo(config, self.adapters, self.phases_s, self.weights)

    # Requests

    def preprocess(self, request: EngineCoreRequest) -> Request:
        """What `add` takes; any thread may call it, one at a time."""
        params = request.sampling_params
        if params is not None and params.structured_outputs is not None:
            name = getattr(request, "external_req_id", None) or request.request_id
            self._grammars.key = self._keys[request.request_id] = name.partition("#")[0]
        made, _ = self._open().preprocess_add_request(request)
        return made

    def add(self, request: Request) -> None:
        """Add a request."""
        self._open().add_request(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown ones are ignored."""
        for one in request_ids:
            if key := self._keys.pop(one, ""):
                self._grammars.forget(key)
        if request_ids and self._core is not None:
            self._core.abort_requests(list(request_ids))

    def abort_all(self) -> None:
        """Drop all requests."""
        scheduler: Any = self._open().scheduler
        self.abort(list(scheduler.requests))

    def freeze(self, is_frozen: bool) -> None:
        """Have no work until it is called again; requests stay as they are."""
        self._is_frozen = is_frozen

    @property
    def has_work(self) -> bool:
        """Whether `step` has work."""
        core = self._core
        if core is None or self._is_frozen:
            return False
        return core.scheduler.has_requests() or bool(core.batch_queue)

    def step(self) -> EngineCoreOutputs | None:
        """Run one step; after an exception the core is unusable."""
        core = self._open()
        outputs, has_executed = core.step_fn()
        core.post_step(has_executed)
        if not outputs and self._grammars.is_compiling:
            clock.sleep(_COMPILING_S)  # vLLM returns at once
        return outputs.get(0) if outputs else None

    def refused(self) -> dict[str, str]:
        """Requests whose grammars cannot be compiled, by lane entry, with the reasons."""
        refused = self._grammars.refused()
        if not self._grammars.is_compiling:
            self._keys.clear()
        return refused

    def is_worn(self) -> bool:
        """Whether its process should be replaced once it is idle; any thread may ask."""
        return self._grammars.is_stuck

    def supported_tasks(self) -> Any:
        """See vLLM's `EngineCore.get_supported_tasks`."""
        return self._open().get_supported_tasks()

    def reset_mm_cache(self) -> None:
        """See vLLM's `EngineCore.reset_mm_cache`."""
        core: Any = self._open()
        core.reset_mm_cache()

    # The device

    def fall_asleep(self, level: int) -> None:
        """Free the device's memory."""
        core = self._open()
        if level == max(sleep.LEVELS):
            sleep.remove_adapters(core, self.adapters)
        core.reset_prefix_cache()
        with self._lock.exclusive():
            sleep.fall_asleep(core, level)

    def wake(self, level: int) -> None:
        """Wake from that level; after an exception the core is unusable."""
        core = self._open()
        with self._lock.shared():
            sleep.wake_up(core, level)
        if level == max(sleep.LEVELS):
            sleep.add_adapters(core, self.adapters)
        core.reset_prefix_cache()

    def exchange_weights(self, path: str) -> None:
        """Load other weights; after any exception but `Unsupported` the core is unusable."""
        if path:
            check_fit(self.spec.path, path)
        new, before = self._folder(path), self._folder(self.weights)
        sleep.exchange_weights(self._open(), new, before, self.adapters)
        self.weights = path

    def close(self, asleep: int) -> None:
        """Unload the model, which sleeps at that level, and free the device; idempotent."""
        core: Any = self._core
        self._core = None
        if core is None:
            return
        with held_back(has_kernels=True), self._lock.shared():
            if asleep and not current_platform.is_cpu():
                core.wake_up()  # vLLM frees memory by unmapping it, which must be mapped then
            keep_allocators()
            core.shutdown()
            del core
            let_go()

    def _warm_up(self) -> None:
        """Run a greedy and a sampled request, so that the first real request loads nothing."""
        model = self.config.model_config
        tokens = [min(1, model.get_vocab_size() - 1)]
        for number, temperature in enumerate((0.0, 1.0)):
            sampling = build_params(
                SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True),
                streams=False,
                detokenize=False,
            )
            pooling = self._pooling_params() if model.runner_type == "pooling" else None
            request = EngineCoreRequest(
                request_id=f"{_WARM_UP}-{number}",
                prompt_token_ids=tokens,
                mm_features=None,
                sampling_params=None if pooling else sampling,
                pooling_params=pooling,
                arrival_time=clock.wall(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            self.add(self.preprocess(request))
        while self.has_work:
            self.step()

    def _pooling_params(self) -> PoolingParams:
        """The parameters of a request for the model's own task."""
        model = self.config.model_config
        params = PoolingParams(task=model.get_pooling_task(self.supported_tasks()))
        params.verify(model)
        return params

    def _folder(self, weights: str) -> str:
        return weights or folder_of(self.spec.path, self.spec.revision)

    def _open(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("the engine is closed")
        return self._core
