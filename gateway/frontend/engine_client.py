# ruff: noqa: ARG002 - vLLM's class decides on the arguments
"""vLLM's `EngineClient` over the queue: `generate` submits, and yields what workers publish."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NoReturn

from msgspec.structs import replace
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.input_processor import InputProcessor

from gateway.frontend.media import NamedMedia, lengthen_prompt, name_media
from gateway.frontend.outputs import OutputStream, whole_output
from gateway.frontend.params import check_constraint, wire_params
from gateway.frontend.pooling import InputGroup, tasks_of
from gateway.frontend.side import at_home, each_at_home, end_turn, tell_home
from gateway.http.context import RequestContext, current
from gateway.http.errors import GatewayError, of_result, unavailable
from gateway.queue.yard import wire_input, wire_pooling
from tokenyard.process.interpreter import run_deep
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.media import Media
from tokenyard.protocol.replies import Result, to_result
from tokenyard.protocol.sampling import MAX_GRAMMAR_BYTES
from tokenyard.protocol.wire import TASKS as WIRE_TASKS
from tokenyard.protocol.wire import PoolingParams, Request, Task, pack_tokens

if TYPE_CHECKING:
    import vllm
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.renderers import BaseRenderer
    from vllm.tasks import SupportedTask
    from vllm.v1.engine import EngineCoreRequest

    from gateway.queue.yard import YardQueue


def _refuses(what: str) -> Callable[..., NoReturn]:
    """A method that refuses."""

    def refuse(*_: object, **__: object) -> NoReturn:
        message = f"{what}: use the command `tokenyard`, not the gateway"
        raise GatewayError(501, message)

    return refuse


class QueueEngineClient(EngineClient):
    """One model of the yard. There is no engine, no weight and no device in this process."""

    def __init__(
        self,
        model: str,
        config: VllmConfig,
        queue: YardQueue,
        stated: tuple[str, ...],
        max_grammar_bytes: int = MAX_GRAMMAR_BYTES,
    ) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer_from_config(config)
        tokenize_short_inline(self.renderer)
        name_media(self.renderer)
        self.input_processor = InputProcessor(config, self.renderer)
        self.tasks = tasks_of(self.model_config)
        self._groups: dict[tuple[Any, ...], InputGroup] = {}
        self._model = model
        self._queue = queue
        self._stated = stated
        self._max_grammar_bytes = max_grammar_bytes

    async def generate(
        self,
        prompt: Any,
        sampling_params: vllm.SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a tokenized request and yield its outputs; errors also settle the ticket."""
        context = current()
        with _settling(context):
            check_constraint(sampling_params, self._max_grammar_bytes)
            if "type" not in prompt:  # vLLM asks for the language of a sound by such a prompt
                parsed = parse_model_prompt(self.model_config, prompt)
                (prompt,) = await self.renderer.render_cmpl_async([parsed])
            process = functools.partial(
                self.input_processor.process_inputs,
                request_id,
                prompt,
                sampling_params,
                self.tasks,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
                session_id=session_id,
            )
            if sampling_params.structured_outputs is None:
                core = process()
            else:  # it parses the grammar
                core = await asyncio.wrap_future(run_deep(process))
            params = core.sampling_params or sampling_params
            core.lora_request = lora_request  # there is no engine here to check it
            request = self._request(context, core, params, session_id, priority, trace_headers)
            if params.structured_outputs is not None:  # nothing else asks where reasoning ends
                request = replace(
                    request,
                    reasoning_ended=reasoning_ended,
                    reasoning_parser_kwargs=reasoning_parser_kwargs or {},
                )
            media: NamedMedia = prompt.get("media") or NamedMedia()
            request = replace(request, media=media.names)
            is_known = await self._is_known(context, request)
            text = prompt_text if prompt_text is not None else _text_of(prompt)
            contents = None if is_known else media.contents
            answer = self._answer(context, request, core, params, text, contents)
            async with aclosing(answer) as outputs:
                async for output in outputs:
                    yield output

    async def encode(
        self,
        prompt: Any,
        pooling_params: vllm.PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Submit a tokenized input, with others of its HTTP request, and yield its output."""
        context = current()
        with _settling(context):
            if "media" in prompt:
                raise GatewayError(400, "tasks that pool take text only")
            core = self.input_processor.process_inputs(
                request_id,
                prompt,
                pooling_params,
                self.tasks,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
            )
            core.lora_request = lora_request
            params = wire_pooling(core.pooling_params or pooling_params)
            task = (core.pooling_params or pooling_params).task
            key = context.durable_id, lora_request and lora_request.lora_name, task, repr(params)
            group = self._groups.get(key)
            if group is None:
                ask = functools.partial(self._pool, context, params, priority, trace_headers)
                group = self._groups[key] = InputGroup(ask)
            output = await group.output_of(core, lambda: self._end_group(key))
        yield output

    def _end_group(self, key: tuple[Any, ...]) -> None:
        del self._groups[key]
        end_turn()

    async def _pool(
        self,
        context: RequestContext,
        params: PoolingParams,
        priority: int,
        trace_headers: Mapping[str, str] | None,
        parts: list[EngineCoreRequest],
    ) -> Result:
        """Submit inputs as one request, and wait for its result."""
        first = parts[0]
        request = Request(
            task=_task_of(first),
            inputs=[wire_input(part.prompt_token_ids or (), part.pooling_params) for part in parts],
            pooling=params,
            **self._shared(context, first, "", priority, trace_headers),
        )
        async with aclosing(each_at_home(self._queue.ask(request, context))) as replies:
            async for reply in replies:
                if reply.event == "result":
                    result = to_result(reply)
                    context.timing = result.timing
                    if not result.ok:
                        raise of_result(result.error)
                    return result
        raise AssertionError("the replies of a request end with its result")

    def _request(
        self,
        context: RequestContext,
        core: EngineCoreRequest,
        params: vllm.SamplingParams,
        session_id: str | None,
        priority: int,
        trace_headers: Mapping[str, str] | None,
    ) -> Request:
        is_stream = params.output_kind is RequestOutputKind.DELTA
        # The text of a stream is made here, token by token.
        detokenize = params.detokenize and (
            not is_stream or bool(params.stop) or params.logprobs is not None
        )
        return Request(
            tokens=pack_tokens(core.prompt_token_ids or ()),
            params=wire_params(params, detokenize=detokenize),
            # A stream that shows its prompt begins with what only the result has.
            stream=is_stream and params.prompt_logprobs is None,
            stream_interval_ms=context.stream_interval_ms,
            stated=self._stated,
            **self._shared(context, core, session_id or "", priority, trace_headers),
        )

    def _shared(
        self,
        context: RequestContext,
        core: EngineCoreRequest,
        session: str,
        priority: int,
        trace_headers: Mapping[str, str] | None,
    ) -> dict[str, Any]:
        """The fields of a request that do not depend on its task; raises `GatewayError`."""
        if core.prompt_token_ids is None:
            raise GatewayError(400, "embeddings do not go through the queue")
        if priority < 0 and not context.may_go_first:
            raise GatewayError(403, "this key may not use a negative priority", param="priority")
        return {
            "id": core.request_id,
            "client": context.client,
            "model": core.lora_request.lora_name if core.lora_request else self._model,
            "priority": priority,
            "deadline_ms": context.deadline_ms,
            "result_ttl_s": context.keep_s,
            "tenant": context.tenant,
            "session": session,
            "metadata": dict(trace_headers or {}),
            "cache_salt": core.cache_salt or "",
        }

    async def _is_known(self, context: RequestContext, request: Request) -> bool:
        """Whether the queue has the request, whatever the URLs of its media hold by now.

        Raises `GatewayError` where it has not, and media could not be fetched.
        """
        has_fetched = context.fetched_bytes or context.unfetched is not None
        if has_fetched and not context.is_first and await at_home(self._queue.has(request)):
            return True
        if context.unfetched is not None:
            raise context.unfetched
        return context.is_replay

    async def _answer(
        self,
        context: RequestContext,
        request: Request,
        core: EngineCoreRequest,
        params: vllm.SamplingParams,
        text: str | None,
        media: Media | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        lora = core.lora_request
        is_stream = params.output_kind is RequestOutputKind.DELTA
        stream = OutputStream(core, params, self.renderer.tokenizer, text, lora)
        end_turn()
        async with aclosing(each_at_home(self._queue.ask(request, context, media))) as replies:
            async for reply in replies:
                result = to_result(reply) if reply.event == "result" else None
                if result is not None:
                    context.timing = result.timing
                    if not result.ok:
                        raise of_result(result.error)
                    if request.media and result.usage is not None:
                        lengthen_prompt(core, result.usage.prompt_tokens)
                if is_stream:
                    for output in stream.read(reply):
                        yield output
                elif result is not None:
                    yield whole_output(request.id, text, core.prompt_token_ids, result, lora)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Nothing: closing the generator of a request cancels it."""

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """What the model does, as far as its configuration shows."""
        return self.tasks

    async def check_health(self) -> None:
        """Always healthy: the gateway's own probes look at the broker."""

    async def is_tracing_enabled(self) -> bool:
        """Trace headers go on to the worker, which decides."""
        return True

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Workers hold the adapters of the models file."""
        return True

    async def do_log_stats(self) -> None:
        """Workers keep the statistics."""

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """No KV transfer begins before the queue."""

    @property
    def is_running(self) -> bool:
        """Whether requests can be taken."""
        return True

    @property
    def is_stopped(self) -> bool:
        """Inverse of `is_running`."""
        return False

    @property
    def errored(self) -> bool:
        """Never: there is no engine here that could die."""
        return False

    @property
    def dead_error(self) -> BaseException:
        """For `errored`."""
        return RuntimeError("there is no engine in the gateway")

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to shut down."""

    # What vLLM's server may ask of an engine, and no gateway can do.

    start_profile: Any = _refuses("profiles")
    stop_profile: Any = _refuses("profiles")
    reset_mm_cache: Any = _refuses("caches")
    reset_encoder_cache: Any = _refuses("caches")
    reset_prefix_cache: Any = _refuses("caches")
    release_kv_cache_memory: Any = _refuses("caches")
    sleep: Any = _refuses("sleep")
    wake_up: Any = _refuses("sleep")
    pause_generation: Any = _refuses("pauses")
    resume_generation: Any = _refuses("pauses")

    async def is_sleeping(self) -> bool:
        """The gateway never sleeps."""
        return False

    async def is_paused(self) -> bool:
        """The gateway never pauses."""
        return False


@contextmanager
def _settling(context: RequestContext) -> Iterator[None]:
    """Errors also settle the ticket of the HTTP request."""
    try:
        yield
    except GatewayError as error:
        has_begun = context.ticket.decided.is_set()
        tell_home(context.ticket.fail, error)
        if has_begun:  # vLLM writes the status into the stream
            raise GracefulHTTPError(error.message, HTTPStatus(error.status)) from error
        raise
    except TokenyardError as error:
        tell_home(context.ticket.fail, unavailable(str(error)))
        raise
    except (ValueError, VLLMClientError) as error:  # vLLM's validation
        tell_home(context.ticket.fail, _refused(error))
        raise


def _task_of(core: EngineCoreRequest) -> Task:
    """The task of a request that pools; raises `GatewayError` for one that the wire lacks."""
    name = core.pooling_params and core.pooling_params.task
    for task in WIRE_TASKS:
        if task == name:
            return task
    raise GatewayError(400, f"the task {name!r} does not go through the queue", param="task")


def _refused(error: Exception) -> GatewayError:
    """A refusal in the words of vLLM's server."""
    told = create_error_response(error).error
    return GatewayError(told.code, told.message, param=told.param, code=told.code, kind=told.type)


def _text_of(prompt: Any) -> str | None:
    return prompt.get("prompt") if isinstance(prompt, dict) else None


# Tokenizes short prompts in the event loop.
#
# vLLM does that in a thread. For a short prompt it takes less time than to hand it over and to get
# the interpreter back, twice, beside the tokens of other streams.

#: Longest text that is tokenized in the event loop; takes a millisecond or two.
SHORT: Final = 4096


def tokenize_short_inline(renderer: BaseRenderer[Any]) -> None:
    """Let a renderer tokenize a short text where it is called, and others in its thread.

    A tokenizer keeps the truncation of its last call, so it may serve one call at a time: while the
    thread has one, short texts go there, too.
    """
    # vLLM has no setting for this. A version without these two keeps its own way.
    in_thread: Callable[..., Awaitable[Any]] | None
    in_thread = getattr(renderer, "_tokenize_prompt_async", None)
    here: Callable[..., Any] | None = getattr(renderer, "_tokenize_prompt", None)
    if in_thread is None or here is None:
        return
    others = 0

    async def tokenize(prompt: Any, params: Any) -> Any:
        nonlocal others
        if not others and len(prompt["prompt"]) <= SHORT:
            return here(prompt, params)
        others += 1
        try:
            return await in_thread(prompt, params)
        finally:
            others -= 1

    renderer._tokenize_prompt_async = tokenize  # noqa: SLF001
