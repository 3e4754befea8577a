"""vLLM in this process and thread: `vllm.LLMEngine`, by its public API.

Set the environment (`worker.engines.vllm.environment`) before you import this module: vLLM reads
part of it during its import. `VllmBackend` makes engines. Works with vLLM 0.26 to 0.32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import vllm
from vllm import LLMEngine
from vllm.platforms import current_platform

from tokenyard import clock
from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.wire import Assignment, SamplingParams
from worker.engines import EngineEvent, EngineInfo, Finished, RequestError, Unsupported
from worker.engines.admission import check_params, check_prompt, check_resumable, prompt_field
from worker.engines.checkpoints import check_fit
from worker.engines.device_lock import DeviceLock
from worker.engines.logprobs import wanted
from worker.engines.resume import Way, choose_way
from worker.engines.stopwatch import Stopwatch
from worker.engines.vllm.arguments import cache_tokens, engine_config, folder_of, lora_requests
from worker.engines.vllm.branches import (
    Branch,
    Branches,
    PieceSize,
    request_of_choice,
    tokens_so_far,
)
from worker.engines.vllm.collectors import (
    Continued,
    Diverged,
    OutputCollector,
    Repeated,
    Streamed,
    Whole,
    unfulfillable,
)
from worker.engines.vllm.executor import EXECUTOR, with_inner_phases
from worker.engines.vllm.grammars import GrammarLimits, GrammarThreads
from worker.engines.vllm.params import ParamsMaker, build_params, refusal
from worker.engines.vllm.reasoning import Reasoning
from worker.engines.vllm.request import EngineRequest
from worker.engines.vllm.sleep import (
    LEVELS,
    add_adapters,
    can_sleep,
    exchange_weights,
    fall_asleep,
    remove_adapters,
    wake_up,
)
from worker.engines.vllm.tokenizer import ModelTokenizer
from worker.engines.vllm.warm_base import held_back, keep_allocators, let_go
from worker.models import ModelSpec

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.executor.abstract import Executor

logger = logging.getLogger("tokenyard.worker")

_WARM_UP: Final = "tokenyard-warm-up"
#: Pause between steps while all requests wait for their grammars.
_COMPILING_S: Final = 0.001


class VllmEngine:
    """One model in one `vllm.LLMEngine`.

    `worker.engines.logprobs` describes the form of logprobs, `worker.engines.resume` how a stream
    continues after a crash and when that is inexact.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: int = 0,
        executor: type[Executor] | None = None,
        weights: str = "",
        lock: DeviceLock | None = None,
        log_stats: bool = False,
        grammars: GrammarLimits | None = None,
    ) -> None:
        """Load the model and run it once; see `engine_config` for the arguments.

        Sleep, wake and unload take ``lock``, which other processes of the device share; the caller
        must hold it during the load. With ``log_stats`` vLLM keeps metrics for
        `worker.process.stats.read_stats`.

        Raises vLLM's errors if the model cannot be loaded (`let_go` cleans up after them), and
        `Unsupported` for weights that do not fit.
        """
        if weights:
            check_fit(spec.path, weights)
        self._stopwatch = Stopwatch()
        self._lock = lock or DeviceLock()
        self._spec = spec
        self._asleep = 0  # the level
        self._weights = weights
        self._answers: dict[str, OutputCollector] = {}
        self._branches: dict[str, list[str]] = {}  # request ids of branches, by lane entry
        self._ready: list[EngineEvent] = []  # answers that need no step
        self._params = ParamsMaker()
        with self._stopwatch.phase("config"):
            config = engine_config(spec, device, executor, weights)
            self._adapters = lora_requests(spec)
        with self._stopwatch.phase(EXECUTOR):
            self._engine: LLMEngine | None = LLMEngine.from_vllm_config(
                config, disable_log_stats=not log_stats
            )
        self._grammars = GrammarThreads(grammars or GrammarLimits())
        self._grammars.stand_in(self._engine)
        self._pieces = PieceSize(config.scheduler_config.stream_interval)
        model = config.model_config
        self._has_second_runner = bool(getattr(config, "use_v2_model_runner", False))
        # On a CPU with adapters, vLLM takes the tokens of one prompt for the requests of the step.
        self._fails_by_prompt_scores = (
            bool(spec.adapters) and spec.max_num_seqs > 1 and current_platform.is_cpu()
        )
        self._tokenizer = ModelTokenizer(self._engine, model)
        self._max_model_len: int = model.max_model_len
        self._vocab_size: int = model.get_vocab_size()
        self._reasoning = Reasoning(config, self._tokenizer.of_vllm)
        self._cache_tokens = cache_tokens(config)
        if self._adapters:
            with self._stopwatch.phase("adapters"):
                add_adapters(self._engine, self._adapters)
        with self._stopwatch.phase("warm-up"):
            self._warm_up(self._engine)
        self._phases_s = with_inner_phases(self._stopwatch.phases_s, self._engine.model_executor)

    @property
    def info(self) -> EngineInfo:
        """The model and the limits."""
        return EngineInfo(
            engine="vllm",
            engine_version=vllm.__version__,
            model=self._spec.name,
            revision=self._spec.revision,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            max_num_seqs=self._spec.max_num_seqs,
            tokenizer=self._spec.path if self._tokenizer.is_there else "",
            adapters=tuple(self._adapters),
            phases_s=dict(self._phases_s),
            weights=self._weights,
            cache_tokens=self._cache_tokens,
        )

    def add(self, assignment: Assignment) -> None:
        """Add a request; see `worker.engines.Engine.add`."""
        request, params = assignment.request, assignment.request.params
        check_resumable(assignment)
        check_params(params, self._vocab_size)
        self._grammars.check(params)
        self._reasoning.check(request)
        self._check_for_runner(params)
        self._tokenizer.check(params, request.wants_text)
        prompt = self._tokenizer.prompt(assignment)
        check_prompt(prompt_field(request), prompt, self._vocab_size, self._max_model_len)
        asked = EngineRequest.of(assignment, prompt)
        way = choose_way(
            params,
            published=any(asked.by_choice),
            can_show_text=self._tokenizer.can_continue(asked),
        )
        if way is Way.BEHIND:
            self._go_on(asked)
        else:
            self._start(asked, way)

    def abort(self, keys: Iterable[str]) -> None:
        """Drop requests by lane entry; unknown ones are ignored."""
        gone = set(keys)
        for key in gone:
            self._grammars.forget(key)
        ids = [one for key in gone for one in (key, *self._branches.pop(key, ()))]
        known = [one for one in ids if self._answers.pop(one, None) is not None]
        self._ready = [event for event in self._ready if event.key not in gone]
        if known and self._engine is not None:
            self._engine.abort_request(known)

    def take_out(self, key: str) -> Finished | None:
        """Stop a request and return its output; see `worker.engines.Engine.take_out`."""
        branches = self._branches.get(key, ())
        running = [self._answers[one] for one in (key, *branches) if one in self._answers]
        if not running:
            return None
        answer = running[0]
        if isinstance(answer, Whole):
            answer.known = tokens_so_far(self._engine, key)
        self.abort([key])
        return answer.so_far()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work."""
        return bool(self._answers or self._ready)

    def progress(self) -> dict[str, int]:
        """Tokens made so far of whole answers; see `worker.engines.Engine.progress`."""
        whole = (key for key, answer in self._answers.items() if isinstance(answer, Whole))
        return {key: sum(map(len, tokens_so_far(self._engine, key))) for key in whole}

    @property
    def is_worn(self) -> bool:
        """Whether its process should be replaced; see `worker.engines.Engine.is_worn`."""
        return self._grammars.is_stuck

    def step(self) -> list[EngineEvent]:
        """Run one step for all running requests; after an exception the engine is unusable."""
        events, self._ready = self._ready, []
        for key, why in self._grammars.refused().items():
            self.abort([key])
            events.append(unfulfillable(key, why))
        if self._engine is None or not self._answers:
            return events
        outputs = self._engine.step()
        if not outputs and self._grammars.is_compiling:
            clock.sleep(_COMPILING_S)  # vLLM returns at once
        self._pieces.note(len(self._answers), clock.monotonic())
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            try:
                answer.take(cast("RequestOutput", output), events)  # never a pooling model
            except Diverged as error:
                self._go_on_behind(answer, error)
                continue
            if answer.is_finished:
                del self._answers[output.request_id]
                if not output.finished:
                    self._engine.abort_request([output.request_id])
                if isinstance(answer, Branch) and answer.branches.is_over:
                    self.abort([answer.asked.key])
        return events

    def sleep(self, level: int) -> None:
        """Free the device's memory; see `worker.engines.Engine.sleep`."""
        engine = self._open()
        if level not in LEVELS:
            raise Unsupported(f"there is no sleep level {level}, only {LEVELS}")
        if not can_sleep(self._spec):
            raise Unsupported("this model was loaded with sleep_level 0; unload it instead")
        if self.has_unfinished:
            raise RuntimeError("requests are unfinished; finish or abort them before the sleep")
        if self._asleep:
            raise Unsupported(f"the engine sleeps already, at level {self._asleep}")
        if level == max(LEVELS):
            remove_adapters(engine, self._adapters)
        engine.reset_prefix_cache()
        with self._lock.exclusive():
            fall_asleep(engine, level)
        self._asleep = level

    def wake(self) -> None:
        """Wake from sleep; after an exception the engine is unusable."""
        engine = self._open()
        if not self._asleep:
            return
        with self._lock.shared():
            wake_up(engine, self._asleep)
        if self._asleep == max(LEVELS):
            add_adapters(engine, self._adapters)
        engine.reset_prefix_cache()
        self._asleep = 0

    def reload(self, path: str) -> None:
        """Load other weights; after any exception but `Unsupported` the engine is unusable."""
        engine = self._open()
        if self._asleep:
            raise Unsupported(f"the engine sleeps, at level {self._asleep}; wake it first")
        if path:
            check_fit(self._spec.path, path)
        exchange_weights(engine, self._folder(path), self._folder(self._weights), self._adapters)
        self._weights = path

    def close(self) -> None:
        """Unload the model and free the device; idempotent."""
        engine, self._engine = self._engine, None
        self._answers.clear()
        self._ready.clear()
        if engine is None:
            return
        with held_back(has_kernels=True), self._lock.shared():
            if self._asleep and not current_platform.is_cpu():
                engine.wake_up()  # vLLM frees memory by unmapping it, which must be mapped then
            keep_allocators()
            engine.engine_core.shutdown()
            del engine
            let_go()

    def _start(self, asked: EngineRequest, way: Way) -> None:
        """Run a request from its first token."""
        request = asked.assignment.request
        # A deadline shows the output so far, so each step must return its tokens.
        streams = request.stream or request.deadline_ms is not None or way is Way.AGAIN
        changes = asked.seed_at_start() if streams else {}
        answer: OutputCollector = Whole(asked)
        if streams:
            answer = Repeated(asked) if way is Way.AGAIN else Streamed(asked)
        self._submit(answer, asked.prompt, streams, self._tokenizer.detokenizes(asked), changes)

    def _go_on(self, asked: EngineRequest) -> None:
        """Continue a request after its published tokens, each choice after its own."""
        if asked.params.n > 1:
            self._go_on_with_all(asked)
            return
        answer = Continued(asked, self._tokenizer.text_stream(asked))
        ended = self._tokenizer.ending_of_published(asked)
        if ended is not None:
            self._ready.append(answer.ended(*ended))
        else:
            self._continue(answer, answer, asked.key)

    def _go_on_with_all(self, asked: EngineRequest) -> None:
        branches = Branches(asked)
        choices = [request_of_choice(asked, index) for index in range(asked.params.n)]
        made = [
            Branch(branches, index, Continued(one, self._tokenizer.text_stream(one)))
            for index, one in enumerate(choices)
        ]
        self._branches[asked.key] = [one.request_id for one in made]
        for branch in made:
            answer = branch.answer
            ended = self._tokenizer.ending_of_published(branch.asked)
            if answer.stopped is not None:
                ended = "stop", answer.stopped
            if ended is not None:
                self._ready += branch.end(answer.ended(*ended))
            else:
                self._continue(branch, answer, branch.request_id)
        if branches.is_over:
            del self._branches[asked.key]

    def _continue(self, answer: OutputCollector, one: Continued, request_id: str) -> None:
        """Continue one unfinished choice after its published tokens."""
        asked = one.asked
        changes = asked.changes_to_continue()
        if self._fails_by_prompt_scores:
            changes.pop("prompt_logprobs", None)
        decodes = wanted(asked.params) is not None and self._tokenizer.detokenizes(asked)
        self._submit(answer, asked.prompt + asked.published, True, decodes, changes, request_id)

    def _submit(
        self,
        answer: OutputCollector,
        tokens: list[int],
        streams: bool,
        detokenize: bool,
        changes: dict[str, Any],
        request_id: str = "",
    ) -> None:
        """Add a request to vLLM; raises `InvalidRequest` if vLLM refuses it.

        The request id in vLLM is the lane entry, or ``request_id``.
        """
        engine = self._open()
        if self._asleep:
            raise RuntimeError("the engine sleeps; wake it first")
        asked = answer.asked
        self._grammars.key = asked.key
        params = self._params.make(asked.params, streams, detokenize, changes)
        request_id = request_id or asked.key
        # vLLM 0.26 applies this to all requests added later.
        engine.output_processor.stream_interval = self._piece_size(answer)
        request = asked.assignment.request
        prompt: Any = {"type": "token", "prompt_token_ids": tokens}
        if salt := request.prefix_salt:
            prompt["cache_salt"] = salt
        lora = self._adapters.get(request.model)
        try:
            if self._reasoning.concerns(request):
                prompt = self._reasoning.prepare(engine, request_id, prompt, params, lora, request)
            engine.add_request(
                request_id, prompt, params, lora_request=lora, priority=request.priority
            )
        except Exception as error:  # as in build_params: no common base class in all versions
            engine.abort_request([request_id])  # vLLM may have added part of it
            self.abort([asked.key])  # and its other choices
            raise refusal(error, asked.params) from error
        self._answers[request_id] = answer

    def _piece_size(self, answer: OutputCollector) -> int:
        """Tokens that vLLM returns at a time; a deadline needs each token immediately."""
        request, params = answer.asked.assignment.request, answer.asked.params
        if type(answer) is not Streamed or params.stream_interval or request.deadline_ms:
            return self._pieces.least
        return self._pieces.choose(len(self._answers))

    def _go_on_behind(self, answer: OutputCollector, fault: Diverged) -> None:
        """Continue after the published tokens, because the repeated run differs from them."""
        asked = answer.asked
        if isinstance(answer, Repeated):  # other choices may already have new tokens
            asked = replace(asked, by_choice=answer.shown)
        self.abort([asked.key])
        logger.warning("request %s: %s; continuing after that", asked.assignment.sid, fault)
        text_is_lost = not self._tokenizer.can_continue(asked)
        if asked.params.structured_outputs is not None or text_is_lost:
            self._ready.append(
                RequestError(
                    asked.key,
                    Code.INFERENCE_ERROR,
                    f"cannot continue after a crash: {fault}",
                )
            )
            return
        self._go_on(asked)

    def _check_for_runner(self, params: SamplingParams) -> None:
        """Refuse parameters with which the model runner would give wrong answers in this step.

        In vLLM's V1 model runner a request that names token ids replaces the logprobs of all other
        requests in the step by those of token 0. Raises `InvalidRequest`.
        """
        if params.logprob_token_ids and not self._has_second_runner:
            raise InvalidRequest(
                "params.logprob_token_ids",
                "needs vLLM's V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1), which this worker's"
                " engine has not; ask for logprobs instead",
            )
        if params.prompt_logprobs is not None and self._fails_by_prompt_scores:
            raise InvalidRequest(
                "params.prompt_logprobs",
                "vLLM cannot score prompts together on a CPU if the model has adapters; ask a model"
                " of the models file without adapters, or one with max_num_seqs = 1",
            )

    def _warm_up(self, engine: LLMEngine) -> None:
        """Run a greedy and a sampled request, so that the first real request loads nothing."""
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

    def _folder(self, weights: str) -> str:
        return weights or folder_of(self._spec.path, self._spec.revision)

    def _open(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("the engine is closed")
        return self._engine
