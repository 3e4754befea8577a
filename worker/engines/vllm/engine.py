"""The front of a model in vLLM: `vllm.LLMEngine` over a core in another process.

Set the environment (`worker.engines.vllm.environment`) before you import this module: vLLM reads
part of it during its import. `RemoteBackend` makes engines. Works with vLLM 0.26 to 0.32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import vllm
from vllm import LLMEngine
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from tokenyard import clock
from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.wire import GENERATE, Assignment, SamplingParams, prompt_field
from worker.engines import EngineEvent, EngineInfo, Finished, RequestError, Unsupported
from worker.engines.admission import check_params, check_prompt, check_resumable, check_task
from worker.engines.logprobs import wanted
from worker.engines.resume import Way, choose_way
from worker.engines.vllm.arguments import cache_tokens
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
    Repeated,
    Streamed,
    Whole,
    unfulfillable,
)
from worker.engines.vllm.grammars import GrammarLimits, check_grammar
from worker.engines.vllm.params import ParamsMaker, reason_of, refusal
from worker.engines.vllm.pooling_answer import PooledPart
from worker.engines.vllm.reasoning import Reasoning
from worker.engines.vllm.request import EngineRequest
from worker.engines.vllm.sleep import LEVELS, can_sleep
from worker.engines.vllm.tokenizer import ModelTokenizer
from worker.engines.vllm.warm_base import replaced
from worker.models import ModelSpec

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from worker.engines.vllm.core import CoreInfo
    from worker.engines.vllm.core_link import SocketLink
    from worker.engines.vllm.pooling import Pooling

logger = logging.getLogger("tokenyard.worker")

#: Collects the outputs of one request of vLLM's.
OutputCollector = Streamed | Branch | PooledPart


class VllmEngine:
    """One model in one `vllm.LLMEngine`.

    `worker.engines.logprobs` describes the form of logprobs, `worker.engines.resume` how a stream
    continues after a crash and when that is inexact.
    """

    def __init__(
        self,
        spec: ModelSpec,
        link: SocketLink,
        info: CoreInfo,
        *,
        log_stats: bool = False,
        grammars: GrammarLimits | None = None,
    ) -> None:
        """With ``log_stats`` vLLM keeps metrics for `worker.process.stats.read_stats`."""
        config = info.config
        self._link = link
        self._spec = spec
        self._asleep = 0  # the level
        self._answers: dict[str, OutputCollector] = {}
        self._branches: dict[str, list[str]] = {}  # request ids of branches, by lane entry
        self._ready: list[EngineEvent] = []  # answers that need no step
        self._params = ParamsMaker()
        self._adapters = info.adapters
        with replaced(EngineCoreClient, "make_client", staticmethod(lambda **_: link)):
            self._engine: LLMEngine | None = LLMEngine(
                config, Executor, log_stats, multiprocess_mode=True
            )
        self._limits = grammars or GrammarLimits()
        self._pieces = PieceSize(config.scheduler_config.stream_interval)
        model = config.model_config
        self._has_second_runner = bool(getattr(config, "use_v2_model_runner", False))
        # On a CPU with adapters, vLLM takes the tokens of one prompt for the requests of the step.
        self._fails_by_prompt_scores = (
            bool(spec.adapters) and spec.max_num_seqs > 1 and current_platform.is_cpu()
        )
        self._tokenizer = ModelTokenizer(self._engine, model)
        self._pooling = _pooling(self._engine) if model.runner_type == "pooling" else None
        self._reasoning = Reasoning(config, self._tokenizer.of_vllm)
        #: The model and the limits.
        self.info = EngineInfo(
            engine="vllm",
            engine_version=vllm.__version__,
            model=spec.name,
            revision=spec.revision,
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            max_num_seqs=spec.max_num_seqs,
            tokenizer=spec.path if self._tokenizer.is_there else "",
            adapters=tuple(self._adapters),
            phases_s=dict(info.phases_s),
            weights=info.weights,
            cache_tokens=cache_tokens(config),
            tasks=self._pooling.tasks if self._pooling else (GENERATE,),
        )

    def listen(self, wake: Callable[[], None]) -> None:
        """See `worker.engines.Engine.listen`."""
        self._link.listen(wake)

    def freeze(self, is_frozen: bool) -> None:
        """See `worker.engines.Engine.freeze`."""
        self._link.call("freeze", is_frozen)

    def add(self, assignment: Assignment) -> None:
        """Add a request; see `worker.engines.Engine.add`."""
        request, params = assignment.request, assignment.request.params
        check_task(request.task, self.info.model, self.info.tasks)
        check_resumable(assignment)
        if request.pools:
            self._pool(assignment)
            return
        check_params(params, self.info.vocab_size)
        check_grammar(params, self._limits)
        self._reasoning.check(request)
        self._check_for_runner(params)
        self._tokenizer.check(params, request.wants_text)
        asked = self._tokenizer.request(assignment)
        vocab_size, max_model_len = self.info.vocab_size, self.info.max_model_len
        check_prompt(prompt_field(request), asked.prompt, vocab_size, max_model_len)
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
        return bool(self._ready) or (self._link.has_outputs and bool(self._answers))

    def progress(self) -> dict[str, int]:
        """Tokens made so far of whole answers; see `worker.engines.Engine.progress`."""
        whole = (key for key, answer in self._answers.items() if isinstance(answer, Whole))
        return {key: sum(map(len, tokens_so_far(self._engine, key))) for key in whole}

    @property
    def is_worn(self) -> bool:
        """Whether its process should be replaced; see `worker.engines.Engine.is_worn`."""
        return bool(self._link.call("is_worn"))

    def step(self) -> list[EngineEvent]:
        """Run one step for all running requests; after an exception the engine is unusable."""
        events, self._ready = self._ready, []
        for key, why in self._link.refused().items():
            self.abort([key])
            events.append(unfulfillable(key, why))
        if self._engine is None or not self._answers:
            return events
        outputs = self._engine.step()
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
                if isinstance(answer, Branch | PooledPart) and answer.ends_request:
                    self.abort([answer.asked.key])
        return events

    def sleep(self, level: int) -> None:
        """Free the device's memory; see `worker.engines.Engine.sleep`."""
        self._open()
        if level not in LEVELS:
            raise Unsupported(f"there is no sleep level {level}, only {LEVELS}")
        if not can_sleep(self._spec):
            raise Unsupported("this model was loaded with sleep_level 0; unload it instead")
        if self._answers or self._ready:
            raise RuntimeError("requests are unfinished; finish or abort them before the sleep")
        if self._asleep:
            raise Unsupported(f"the engine sleeps already, at level {self._asleep}")
        self._link.call("fall_asleep", level)
        self._asleep = level

    def wake(self) -> None:
        """Wake from sleep; after an exception the engine is unusable."""
        self._open()
        if self._asleep:
            self._link.call("wake", self._asleep)
            self._asleep = 0

    def reload(self, path: str) -> None:
        """Load other weights; after any exception but `Unsupported` the engine is unusable."""
        self._open()
        if self._asleep:
            raise Unsupported(f"the engine sleeps, at level {self._asleep}; wake it first")
        self._link.call("exchange_weights", path)
        self.info = replace(self.info, weights=path)

    def close(self) -> None:
        """Unload the model and free the device; idempotent."""
        engine, self._engine = self._engine, None
        self._answers.clear()
        self._ready.clear()
        if engine is not None:
            del engine
            self._link.call("close", self._asleep)

    def _pool(self, assignment: Assignment) -> None:
        """Run the inputs of a request that pools, each as a request of vLLM."""
        engine, pooling, request = self._open(), self._pooling, assignment.request
        if pooling is None:
            raise AssertionError("a request that pools came to a model that does not")
        if self._asleep:
            raise RuntimeError("the engine sleeps; wake it first")
        if assignment.media:
            raise InvalidRequest("messages", f"the task {request.task} takes text only")
        if request.messages is not None:
            asked = self._tokenizer.request(assignment)
        else:
            asked = EngineRequest.of(assignment, [])
        answer, parts = pooling.prepare(asked)
        lora = self._adapters.get(request.model)
        ids = self._branches[assignment.entry] = []
        for part in parts:
            try:
                engine.add_request(
                    part.request_id,
                    part.prompt,
                    part.params,
                    lora_request=lora,
                    priority=request.priority,
                )
            except Exception as error:  # noqa: BLE001 - no common base class in all versions
                engine.abort_request([part.request_id])  # vLLM may have added part of it
                try:
                    answer.refuse(part.index, reason_of(error))
                except InvalidRequest:
                    self.abort([assignment.entry])
                    raise
                continue
            ids.append(part.request_id)
            self._answers[part.request_id] = part
        if answer.is_over:
            self.abort([assignment.entry])
            self._ready.append(answer.end())

    def _start(self, asked: EngineRequest, way: Way) -> None:
        """Run a request from its first token."""
        request = asked.assignment.request
        # A deadline shows the output so far, so each step must return its tokens.
        streams = request.stream or request.deadline_ms is not None or way is Way.AGAIN
        changes = asked.seed_at_start() if streams else {}
        answer: OutputCollector = Whole(asked)
        if streams:
            answer = Repeated(asked) if way is Way.AGAIN else Streamed(asked)
        self._submit(answer, [], self._tokenizer.detokenizes(asked), changes)

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
        branches = Branches()
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
        self._submit(answer, asked.published, decodes, changes, request_id)

    def _submit(
        self,
        answer: OutputCollector,
        published: list[int],
        detokenize: bool,
        changes: dict[str, Any],
        request_id: str = "",
    ) -> None:
        """Add a request to vLLM, behind its published tokens; raises `InvalidRequest`.

        The request id in vLLM is the lane entry, or ``request_id``.
        """
        engine = self._open()
        if self._asleep:
            raise RuntimeError("the engine sleeps; wake it first")
        asked = answer.asked
        streams = not isinstance(answer, Whole)
        params = self._params.make(asked.params, streams, detokenize, changes)
        request_id = request_id or asked.key
        # vLLM 0.26 applies this to all requests added later.
        engine.output_processor.stream_interval = self._piece_size(answer)
        request = asked.assignment.request
        prompt: Any = answer.asked.prompt_and(published)
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
        """Tokens that vLLM returns at a time; who asks for each, or has a deadline, gets one."""
        request, params = answer.asked.assignment.request, answer.asked.params
        wants_each = request.stream_interval_ms == 0 or request.deadline_ms is not None
        if type(answer) is not Streamed or params.stream_interval or wants_each:
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

    def _open(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("the engine is closed")
        return self._engine


def _pooling(engine: LLMEngine) -> Pooling:
    """The tasks of a model that pools; raises `Unsupported`."""
    try:
        from worker.engines.vllm.pooling import Pooling  # older versions lack what it imports
    except ImportError as error:
        why = f"vLLM {vllm.__version__} is too old for a model that pools; install 0.32: {error}"
        raise Unsupported(why) from error
    return Pooling(engine)
