"""The front end of each model: vLLM's own, with its templates, parsers and limits."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import logging
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import vllm
from fastapi import FastAPI
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware
from vllm import AsyncEngineArgs
from vllm.config import PoolerConfig, ReasoningConfig, VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gateway.announcements import ModelProfile
from gateway.frontend import derived
from gateway.frontend.door import open_door
from gateway.frontend.engine_client import QueueEngineClient
from gateway.frontend.fetching import MediaFetcher
from gateway.frontend.media import pass_media_on
from gateway.frontend.params import bound_constraints
from gateway.frontend.pooling import check_path
from gateway.http.context import CURRENT
from gateway.http.errors import GatewayError, unavailable
from tokenyard import clock
from tokenyard.process.interpreter import collect_seldom
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.sampling import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:
    from gateway.queue.yard import YardQueue

log = logging.getLogger("tokenyard.gateway")

#: Models that are made ready at the same time.
_AT_ONCE: Final = 3
#: Each event of a stream would pass them: vLLM's metrics, which nobody can read here, and CORS,
#: which is off.
_UNWANTED: Final[tuple[Any, ...]] = (PrometheusInstrumentatorMiddleware, CORSMiddleware)
#: vLLM adds them to an app for a model that pools, or transcribes.
_MORE_ROUTERS: Final = (
    *(f"pooling.{name}" for name in ("embed", "pooling", "classify", "scoring")),
    *(f"speech_to_text.{name}" for name in ("transcription", "translation")),
)
#: The front end of the request that is being served.
STATE: ContextVar[State] = ContextVar("gateway_state")


def _is_logged(record: logging.LogRecord) -> bool:
    """Not what vLLM logs of refused requests: a client could fill a disk with it."""
    if not record.exc_info or not record.name.startswith("vllm.entrypoints."):
        return True
    context = CURRENT.get()
    is_told = context is not None and context.ticket.error is not None
    told = GatewayError, TokenyardError, VLLMClientError, GracefulHTTPError
    return not (is_told or isinstance(record.exc_info[1], told))


class _CurrentState:
    """`app.state` for vLLM's handlers: that of the model which the request names."""

    def __init__(self, own: State) -> None:
        object.__setattr__(self, "_own", own)

    def __getattr__(self, name: str) -> Any:
        state = STATE.get(None)
        return getattr(self._own if state is None else state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own if STATE.get(None) is None else STATE.get(), name, value)


@functools.cache
def _defaults() -> Namespace:
    make_parser: Any = FlexibleArgumentParser  # it has no types
    args: Namespace = _cli_args().make_arg_parser(make_parser()).parse_args([])
    return args


def _cli_args() -> Any:
    """The module with the arguments of ``vllm serve``, which 0.33 has moved."""
    try:
        return importlib.import_module("vllm.entrypoints.common.cli_args")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.entrypoints.launchers.cli_args")


def default_args() -> Namespace:
    """The defaults of ``vllm serve``: a copy, for vLLM writes into the objects in it."""
    return copy.deepcopy(_defaults())


def serve_args(profile: ModelProfile) -> Namespace:
    """The arguments that ``vllm serve`` would have for this model."""
    args = default_args()
    args.model = args.model_tag = profile.path
    args.served_model_name = [profile.name]
    args.enable_log_requests = False
    args.disable_log_stats = True
    # vLLM's would cache a query in one worker; those of a yard share nothing.
    args.enable_flash_late_interaction = False
    args.mm_processor_cache_gb = 0  # nothing here reads a picture
    # An adapter's files are the workers' concern: a request only names it.
    args.lora_modules = [LoRAModulePath(name, name) for name in profile.adapters]
    for name, value in profile.arguments.items():
        setattr(args, name, value)
    return args


def model_state(
    profile: ModelProfile, queue: YardQueue, max_grammar_bytes: int = MAX_GRAMMAR_BYTES
) -> tuple[Namespace, QueueEngineClient]:
    """Read a model's configuration, tokenizer and templates; takes up to a second."""
    args = serve_args(profile)
    if isinstance(args.pooler_config, dict):
        args.pooler_config = PoolerConfig(**args.pooler_config)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_model_config()
    config.quantization = None  # only weights need it
    structured, reasoning = engine_args.structured_outputs_config, engine_args.reasoning_config
    if isinstance(reasoning, dict):
        reasoning = ReasoningConfig(**reasoning)
    if engine_args.reasoning_parser:
        structured.reasoning_parser = engine_args.reasoning_parser
        reasoning = reasoning or ReasoningConfig()
        reasoning.reasoning_parser = engine_args.reasoning_parser
    vllm_config = VllmConfig(
        model_config=config, structured_outputs_config=structured, reasoning_config=reasoning
    )
    client = QueueEngineClient(profile.name, vllm_config, queue, profile.stated, max_grammar_bytes)
    return args, client


class FrontEnds:
    """vLLM's FastAPI app, and the state of each model it serves."""

    def __init__(
        self,
        queue: YardQueue,
        max_grammar_bytes: int = MAX_GRAMMAR_BYTES,
        fetcher: MediaFetcher | None = None,
    ) -> None:
        self.fetcher = fetcher or MediaFetcher()
        self._queue = queue
        self._max_grammar_bytes = max_grammar_bytes
        self._made: list[_FrontEnd] = []
        # One at first: vLLM and transformers import much with the first model, which is not safe
        # in several threads.
        self._room = asyncio.Semaphore(1)
        self._has_made_one = False
        self.app = _build()
        open_door(self.app, max_grammar_bytes)
        bound_constraints(max_grammar_bytes)
        pass_media_on(self.fetcher)
        for handler in logging.getLogger().handlers:
            handler.addFilter(_is_logged)
        self.app.state = _CurrentState(self.app.state)  # type: ignore[assignment]

    async def state_of(self, profile: ModelProfile) -> State:
        """The state of a model; made once, in a thread. Raises `GatewayError` where it fails."""
        one = self._find(profile)
        if one is None:
            one = _FrontEnd(profile, asyncio.ensure_future(self._load(profile)))
            self._made.append(one)
        try:
            return await asyncio.shield(one.state)
        except Exception:
            one.failed_at = one.failed_at or clock.monotonic()
            raise

    def forget(self, profile: ModelProfile) -> None:
        """Drop the state of a model; requests under way keep it."""
        self._made = [one for one in self._made if one.profile != profile]

    def failed_at(self, profile: ModelProfile) -> float | None:
        """When the state of a model could not be made, by the monotonic clock."""
        one = self._find(profile)
        return None if one is None else one.failed_at

    def fault(self, profile: ModelProfile) -> str:
        """Why a model cannot be served; "" where it can, or is not ready yet."""
        one = self._find(profile)
        if one is None or not one.state.done() or one.state.cancelled():
            return ""
        error = one.state.exception()
        if error is None:
            return ""
        return error.message if isinstance(error, GatewayError) else repr(error)

    @property
    def version(self) -> str:
        """Of vLLM."""
        return str(vllm.__version__)

    def check_path(self, profile: ModelProfile, path: str) -> None:
        """Raises `GatewayError` where a model whose state is made cannot answer at a path."""
        one = self._find(profile)
        if one is not None:
            client: QueueEngineClient = one.state.result().engine_client
            check_path(path, profile.name, client.model_config, client.tasks)

    def max_model_len(self, profile: ModelProfile) -> int | None:
        """Tokens of prompt and answer together; None where it is not known yet."""
        one = self._find(profile)
        if one is None or not one.state.done() or one.state.cancelled() or one.state.exception():
            return None
        length: int = one.state.result().vllm_config.model_config.max_model_len
        return length

    def _find(self, profile: ModelProfile) -> _FrontEnd | None:
        return next((one for one in self._made if one.profile == profile), None)

    async def _load(self, profile: ModelProfile) -> State:
        if fault := profile.fault or _missing(profile):
            raise _unservable(profile, fault)
        async with self._room:
            try:
                state = await self._make(profile)
            except Exception as error:  # whatever vLLM, transformers or a tokenizer raises
                log.debug("the model %r", profile.name, exc_info=True)
                raise _unservable(profile, str(error).strip()[:1000] or repr(error)) from error
        collect_seldom()  # the modules and objects that came with it stay
        if not self._has_made_one:
            self._has_made_one = True
            for _ in range(_AT_ONCE - 1):
                self._room.release()
        return state

    async def _make(self, profile: ModelProfile) -> State:
        with _template_file(profile) as with_file:
            args, client = await asyncio.to_thread(
                model_state, with_file, self._queue, self._max_grammar_bytes
            )
            state = State()
            state.server = None
            # vLLM's own has random parts: no two gateways would have the same.
            if not {"fingerprint_mode", "fingerprint_value"} & profile.arguments.keys():
                args.fingerprint_mode, args.fingerprint_value = "custom", profile.fingerprint
            await init_app_state(client, state, args, client.tasks)
            derived.replace_modules()  # vLLM imports an endpoint's modules when it needs them
        return state


@dataclass(eq=False, slots=True)
class _FrontEnd:
    """The state of one model, or the error with which it could not be made."""

    profile: ModelProfile
    state: asyncio.Future[State]
    failed_at: float | None = None


@contextmanager
def _template_file(profile: ModelProfile) -> Iterator[ModelProfile]:
    """The profile with its chat template in a file: vLLM garbles text that is not ASCII."""
    text = profile.arguments.get("chat_template")
    if not isinstance(text, str) or "{" not in text:
        yield profile
        return
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield replace(profile, arguments={**profile.arguments, "chat_template": file.name})


def _missing(profile: ModelProfile) -> str:
    """What to do where a model's folder is not on this machine; "" where it is."""
    path = Path(profile.path)
    if not path.is_absolute() or path.exists():
        return ""
    return (
        f"there is no {path} on this machine; copy the model's configuration and tokenizer there, "
        f"or give the gateway --model-paths {profile.name}=PATH"
    )


def _unservable(profile: ModelProfile, why: str) -> GatewayError:
    return unavailable(
        f"this gateway cannot serve the model {profile.name!r}: {why}",
        param="model",
        code="model_not_servable",
        retry_after_s=30.0,
    )


def _build() -> FastAPI:
    root = logging.getLogger()
    level = root.level  # a library that vLLM calls here lowers it
    try:
        return _build_app()
    finally:
        root.setLevel(level)


def _build_app() -> FastAPI:
    args = default_args()
    args.disable_fastapi_docs = True
    app = build_app(args, ("generate",))
    for name in _MORE_ROUTERS:
        module = importlib.import_module(f"vllm.entrypoints.{name}.api_router")
        app.include_router(module.router)
    app.user_middleware = [one for one in app.user_middleware if one.cls not in _UNWANTED]
    app.middleware_stack = app.build_middleware_stack()  # vLLM may have built it already
    return app
