"""vLLM in this process and this thread: `vllm.LLMEngine`, by its public API.

Set the environment (`worker.engines.vllm_environment`) before importing this file: vLLM reads
part of it while it is imported. Works with vLLM 0.26 to 0.32.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import vllm
from vllm import EngineArgs, LLMEngine
from vllm import distributed as vllm_distributed

from tokenyard.errors import Code
from tokenyard.wire import Assignment, SamplingParams, unpack_tokens
from worker.engines import EngineEvent, EngineInfo, Faulted, Finished
from worker.engines.admission import check_params, check_prompt, check_resumable, prompt_field
from worker.engines.prompts import has_tokenizer, prompt_tokens
from worker.engines.resume import TextStream, Way, choose_way, derive_seed, has_history
from worker.engines.vllm_answers import (
    Answer,
    Asked,
    Continued,
    Diverged,
    Repeated,
    Streamed,
    Whole,
)
from worker.engines.vllm_params import build_params, refusal
from worker.models import ModelSpec

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

logger = logging.getLogger("tokenyard.worker")

_GIB: Final = 1024**3
_WARM_UP: Final = "tokenyard-warm-up"


class VllmEngine:
    """One model, held by one `vllm.LLMEngine`.

    Logprobs travel in the form of `worker.engines.logprobs`; how a stream goes on after a crash,
    and where that is inexact, stands in `worker.engines.resume`.
    """

    def __init__(self, spec: ModelSpec, *, import_s: float = 0.0) -> None:
        """Load the model and run it once; ``import_s`` is what importing vLLM took.

        Raises what vLLM raises where the model cannot be loaded.
        """
        self._phases_s = {"import": import_s}
        self._spec = spec
        self._answers: dict[str, Answer] = {}
        self._ready: list[EngineEvent] = []  # answers that need no step
        with self._phase("config"):
            arguments = _engine_args(spec)
        with self._phase("engine"):
            self._engine: LLMEngine | None = LLMEngine.from_engine_args(arguments)
        model = self._engine.model_config
        self._tokenizer: Any = (
            None if arguments.skip_tokenizer_init else self._engine.get_tokenizer()
        )
        self._fast_tokenizer = getattr(self._tokenizer, "backend_tokenizer", None)
        self._max_model_len: int = model.max_model_len
        self._vocab_size: int = model.get_vocab_size()
        self._end_tokens = _end_tokens(model, self._tokenizer)
        with self._phase("warm-up"):
            self._warm_up(self._engine)

    @property
    def info(self) -> EngineInfo:
        """What it serves."""
        return EngineInfo(
            engine="vllm",
            engine_version=vllm.__version__,
            model=self._spec.name,
            revision=self._spec.revision,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            slots=self._spec.max_num_seqs,
            tokenizer="" if self._tokenizer is None else self._spec.path,
            phases_s=dict(self._phases_s),
        )

    def add(self, assignment: Assignment) -> None:
        """Take a request in; see `worker.engines.Engine.add`."""
        request, params = assignment.request, assignment.request.params
        check_resumable(assignment)
        check_params(params, self._vocab_size)
        self._check_text(params, request.wants_text)
        prompt = prompt_tokens(request, self._tokenizer, self._max_model_len)
        check_prompt(prompt_field(request), prompt, self._vocab_size, self._max_model_len)
        asked = Asked(assignment, prompt, unpack_tokens(assignment.published))
        way = choose_way(
            params,
            published=bool(asked.published),
            can_show_text=not self._reads_text(asked) or self._can_continue_text(params),
        )
        if way is Way.BEHIND:
            self._continue(asked)
        else:
            self._start(asked, way)

    def abort(self, keys: Iterable[str]) -> None:
        """Forget requests, by lane entry; unknown ones are ignored."""
        gone = set(keys)
        known = [key for key in gone if self._answers.pop(key, None) is not None]
        self._ready = [event for event in self._ready if event.key not in gone]
        if known and self._engine is not None:
            self._engine.abort_request(known)

    def take_out(self, key: str) -> Finished | None:
        """Stop a request and give what it has made; see `worker.engines.Engine.take_out`."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        self.abort([key])
        return answer.so_far()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._answers or self._ready)

    def step(self) -> list[EngineEvent]:
        """Generate once for all running requests; an exception means that the engine is lost."""
        events, self._ready = self._ready, []
        if self._engine is None or not self._answers:
            return events
        for output in self._engine.step():
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            try:
                answer.take(cast("RequestOutput", output), events)  # it generates, never pools
            except Diverged as fault:
                self._go_on_behind(answer.asked, fault)
                continue
            if answer.is_finished:
                del self._answers[output.request_id]
                if not output.finished:
                    self._engine.abort_request([output.request_id])
        return events

    def close(self) -> None:
        """Let go of the device; idempotent."""
        engine, self._engine = self._engine, None
        self._answers.clear()
        self._ready.clear()
        if engine is None:
            return
        engine.engine_core.shutdown()
        del engine
        leave: Any = vllm_distributed  # these two have no types
        leave.destroy_model_parallel()
        leave.destroy_distributed_environment()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _start(self, asked: Asked, way: Way) -> None:
        """Run a request from its first token."""
        params, request = asked.params, asked.assignment.request
        # What was made until a deadline is shown, so it must be known at every step.
        streams = request.stream or request.deadline_ms is not None or way is Way.AGAIN
        changes: dict[str, Any] = {}
        if streams and params.seed is None and params.temperature > 0 and has_history(params):
            # Should this worker die, another can only repeat what has a seed.
            changes["seed"] = derive_seed(asked.assignment.sid, request.id)
        answer: Answer = Whole(asked)
        if streams:
            answer = Repeated(asked) if way is Way.AGAIN else Streamed(asked)
        self._submit(answer, asked.prompt, streams, self._detokenizes(asked), changes)

    def _continue(self, asked: Asked) -> None:
        """Run a request behind its published tokens, unless they are the whole answer."""
        params, published = asked.params, asked.published
        text = None
        if self._fast_tokenizer is not None and self._reads_text(asked):
            text = TextStream(self._fast_tokenizer, asked.prompt, params)
        answer = Continued(asked, text)
        ended = self._ended(asked)
        if ended is not None:
            self._ready.append(answer.ended(*ended))
            return
        changes: dict[str, Any] = {
            "stop": None,  # the answer's own text looks for them
            "min_tokens": max(0, params.min_tokens - len(published)),
        }
        if params.max_tokens is not None:
            changes["max_tokens"] = params.max_tokens - len(published)
        if params.logprobs is not None:
            changes["prompt_logprobs"] = max(params.logprobs, params.prompt_logprobs or 0)
        if params.seed is not None:
            changes["seed"] = derive_seed(params.seed, len(published))
        decodes = params.logprobs is not None and self._detokenizes(asked)
        self._submit(answer, asked.prompt + published, True, decodes, changes)

    def _submit(
        self,
        answer: Answer,
        tokens: list[int],
        streams: bool,
        detokenize: bool,
        changes: dict[str, Any],
    ) -> None:
        """Hand a request to vLLM; raises `InvalidRequest` where vLLM refuses it."""
        if self._engine is None:
            raise RuntimeError("the engine is closed")
        asked = answer.asked
        params = build_params(asked.params, streams=streams, detokenize=detokenize, **changes)
        try:
            self._engine.add_request(
                asked.key,
                {"type": "token", "prompt_token_ids": tokens},
                params,
                priority=asked.assignment.request.priority,
            )
        except Exception as fault:  # as in build_params: no common root in all versions
            self._engine.abort_request([asked.key])  # it may be half in
            raise refusal(fault, asked.params) from fault
        self._answers[asked.key] = answer

    def _go_on_behind(self, asked: Asked, fault: Diverged) -> None:
        """The repeated run differs: what is published stands, so go on from there."""
        self.abort([asked.key])
        logger.warning("request %s: %s; going on behind it", asked.assignment.sid, fault)
        text_is_lost = self._reads_text(asked) and not self._can_continue_text(asked.params)
        if asked.params.structured_outputs is not None or text_is_lost:
            self._ready.append(
                Faulted(
                    asked.key,
                    Code.INFERENCE_ERROR,
                    f"cannot be taken up after a crash: {fault}",
                )
            )
            return
        self._continue(asked)

    def _ended(self, asked: Asked) -> tuple[str, int | None] | None:
        """Finish and stop reason where the published tokens are the whole answer."""
        params, count = asked.params, len(asked.published)
        last = asked.published[-1]
        if count > params.min_tokens or not params.min_tokens:
            if last in (params.stop_token_ids or ()):
                return "stop", last
            if last in self._end_tokens and not params.ignore_eos:
                return "stop", self._end_tokens[last]
        room = self._max_model_len - len(asked.prompt)
        if count >= min(room, params.max_tokens or room):
            return "length", None
        return None

    def _check_text(self, params: SamplingParams, wants_text: bool) -> None:
        """Refuse what needs a tokenizer where the model has none."""
        if self._tokenizer is not None:
            return
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name):
                raise refusal(ValueError(f"{name} needs a tokenizer; this model has none"), params)
        if wants_text:
            raise refusal(ValueError("detokenize needs a tokenizer; this model has none"), params)

    def _reads_text(self, asked: Asked) -> bool:
        return asked.assignment.request.wants_text or bool(asked.params.stop)

    def _can_continue_text(self, params: SamplingParams) -> bool:
        """`TextStream` needs a fast tokenizer, and knows nothing of vLLM's spacing rule."""
        spaced = params.spaces_between_special_tokens or params.skip_special_tokens
        return self._fast_tokenizer is not None and spaced

    def _detokenizes(self, asked: Asked) -> bool:
        """Whether vLLM is to turn tokens to text: for replies, stop strings or logprobs."""
        params = asked.params
        if self._tokenizer is None or params.detokenize is False:
            return False
        asks = params.logprobs is not None or params.prompt_logprobs is not None
        return self._reads_text(asked) or asks

    def _warm_up(self, engine: LLMEngine) -> None:
        """One greedy and one sampled request, so that the first real one finds all loaded."""
        for number, temperature in enumerate((0.0, 1.0)):
            params = build_params(
                SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True),
                streams=False,
                detokenize=False,
            )
            tokens = [min(1, self._vocab_size - 1)]
            engine.add_request(
                f"{_WARM_UP}-{number}", {"type": "token", "prompt_token_ids": tokens}, params
            )
        while engine.has_unfinished_requests():
            engine.step()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._phases_s[name] = time.perf_counter() - started


def _engine_args(spec: ModelSpec) -> EngineArgs:
    """Arguments of vLLM; those in ``spec.engine_args`` win."""
    named: dict[str, Any] = {
        "model": spec.path,
        "revision": spec.revision or None,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": spec.enforce_eager,
        "skip_tokenizer_init": not has_tokenizer(spec.path),
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "scheduling_policy": "priority",  # a request's priority acts inside the engine too
    }
    if spec.kv_cache_gib:
        named["kv_cache_memory_bytes"] = int(spec.kv_cache_gib * _GIB)
    return EngineArgs(**named | dict(spec.engine_args))


def _end_tokens(model: Any, tokenizer: Any) -> dict[int, int | None]:
    """Tokens that end an answer, and the stop reason that vLLM gives for each."""
    configured = model.try_get_generation_config().get("eos_token_id")
    more = [configured] if isinstance(configured, int) else configured or []
    ends: dict[int, int | None] = {token: token for token in more}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends[tokenizer.eos_token_id] = None
    return ends
