"""A device for vLLM that computes nothing: each step takes a set time, and tokens count upwards.

It is vLLM's ``worker_cls``, so executor, scheduler and engine are the real ones. The device runs
one step at a time: a step starts when it is launched and the step before has ended, as on a GPU,
and vLLM schedules ahead as it does there. The next token of a sequence is the last one plus 1.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

#: Bytes of a page of the KV cache, which holds nothing.
_PAGE: Final = 4096
_FORM: Final = struct.Struct("<Q3d")


@dataclass(frozen=True, slots=True)
class Timing:
    """Steps of a device, and seconds since its start."""

    steps: int = 0
    busy_s: float = 0.0  # the device computes
    waited_s: float = 0.0  # the engine's thread waits for the device
    engine_s: float = 0.0  # the engine's thread is in vLLM's step, and does not wait

    def __sub__(self, other: Self) -> Timing:
        return Timing(
            self.steps - other.steps,
            self.busy_s - other.busy_s,
            self.waited_s - other.waited_s,
            self.engine_s - other.engine_s,
        )


def read_timing(path: Path) -> Timing:
    """The timing of the device that writes to a file."""
    return Timing(*_FORM.unpack(path.read_bytes()))


class TimedWorker(WorkerBase):
    """One made-up device."""

    def __init__(self, vllm_config: VllmConfig, **more: Any) -> None:
        super().__init__(vllm_config=vllm_config, **more)
        more_config: Any = vllm_config.additional_config
        given: Mapping[str, Any] = more_config["timed"]
        self._step_s: float = given["step_ms"] / 1000
        self._sequence_s: float = given["sequence_us"] / 1e6
        self._token_s: float = given["token_us"] / 1e6
        # The CPU's platform turns it off; a GPU has it. The scheduler is made later.
        self.scheduler_config.async_scheduling = True
        self._vocabulary = self.model_config.get_vocab_size()
        self._last: dict[str, int] = {}  # last token of each request
        self._total: dict[str, int] = {}  # its tokens so far
        self._sampled: _Step | None = None
        self._free_at = 0.0
        self._timing = [0, 0.0, 0.0, 0.0]
        Path(given["report"]).write_bytes(bytes(_FORM.size))
        with Path(given["report"]).open("r+b") as file:
            self._report = mmap.mmap(file.fileno(), _FORM.size)
        _watch_engine(self)

    # What vLLM asks a worker at its start

    def init_device(self) -> None:
        """There is none."""
        self.device = torch.device("cpu")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """There is none."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text."""
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One small layer."""
        size = self.cache_config.block_size
        head = _PAGE // (size * 2 * 2)
        kind = FullAttentionSpec(
            block_size=size, num_kv_heads=1, head_size=head, dtype=torch.bfloat16
        )
        return {"model.layers.0.self_attn.attn": kind}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Any would do."""
        return ["LBNHC"]

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        """It does not matter."""

    def determine_available_memory(self) -> int:
        """Bytes for all sequences at full length."""
        blocks = -(-self.model_config.max_model_len // self.cache_config.block_size)
        return _PAGE * (64 + blocks * (self.scheduler_config.max_num_seqs + 1))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Nothing is kept."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """There is nothing to compile."""
        return CompilationTimes(0.0, 0.0)

    def check_health(self) -> None:
        """It is always healthy."""

    def shutdown(self) -> None:
        """Nothing is held."""

    # Steps

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Launch a step."""
        counts = scheduler_output.num_scheduled_tokens
        output = self._output(scheduler_output, counts)
        if not counts:
            return EMPTY_MODEL_RUNNER_OUTPUT
        now, timing = time.monotonic(), self._timing
        prompt_tokens = scheduler_output.total_num_scheduled_tokens - len(counts)
        took = self._step_s + self._sequence_s * len(counts) + self._token_s * prompt_tokens
        self._free_at = max(now, self._free_at) + took
        timing[0] += 1
        timing[1] += took
        self._sampled = _Step(self, self._free_at, output)
        return None

    def sample_tokens(self, _grammar_output: Any) -> AsyncModelRunnerOutput:
        """The tokens of the step that was launched last."""
        sampled, self._sampled = self._sampled, None
        assert sampled is not None
        return sampled

    def wait(self, ends: float) -> None:
        """Wait for the end of a step."""
        began = time.monotonic()
        if ends > began:
            time.sleep(ends - began)
            self._timing[2] += time.monotonic() - began

    def note(self, engine_s: float) -> None:
        """Count seconds in vLLM's step."""
        self._timing[3] += engine_s
        _FORM.pack_into(self._report, 0, *self._timing)

    @property
    def waited_s(self) -> float:
        """Seconds that the engine's thread has waited."""
        return self._timing[2]

    def _output(self, scheduled: SchedulerOutput, counts: Mapping[str, int]) -> ModelRunnerOutput:
        for gone in scheduled.finished_req_ids:
            self._last.pop(gone, None)
            self._total.pop(gone, None)
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prompt_token_ids or [0]
            self._last[new.req_id], self._total[new.req_id] = tokens[-1], len(tokens)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: list[list[int]] = []
        for name, count in counts.items():
            if computed[name] + count < self._total[name]:
                sampled.append([])  # a part of the prompt
                continue
            self._last[name] = (self._last[name] + 1) % self._vocabulary
            self._total[name] += 1
            sampled.append([self._last[name]])
        names = list(counts)
        places = {name: index for index, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)


class _Step(AsyncModelRunnerOutput):
    """A step that the device has been given."""

    def __init__(self, worker: TimedWorker, ends: float, output: ModelRunnerOutput) -> None:
        self._worker = worker
        self._ends = ends
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        """The tokens, when the step has ended."""
        self._worker.wait(self._ends)
        return self._output


def _watch_engine(worker: TimedWorker) -> None:
    """Count the time in vLLM's own step, without the waits for the device."""
    inner = EngineCore.step_with_batch_queue

    def step(core: EngineCore) -> Any:
        began, waited = time.monotonic(), worker.waited_s
        found = inner(core)
        spent = time.monotonic() - began - (worker.waited_s - waited)
        worker.note(spent)
        return found

    core_class: Any = EngineCore
    core_class.step_with_batch_queue = step
