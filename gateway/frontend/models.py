"""The front end of each model: vLLM's own, with its templates, parsers and limits."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.datastructures import State
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gateway.frontend import derived
from gateway.frontend.engine_client import TASKS, QueueEngineClient
from gateway.profile import ModelProfile

if TYPE_CHECKING:
    from gateway.queue.yard import YardQueue

#: The front end of the request that is being served.
STATE: ContextVar[State] = ContextVar("gateway_state")


class _CurrentState:
    """`app.state` for vLLM's handlers: that of the model which the request names."""

    def __init__(self, own: State) -> None:
        object.__setattr__(self, "_own", own)

    def __getattr__(self, name: str) -> Any:
        state = STATE.get(None)
        return getattr(self._own if state is None else state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own if STATE.get(None) is None else STATE.get(), name, value)


def default_args() -> Namespace:
    """The defaults of ``vllm serve``."""
    make_parser: Any = FlexibleArgumentParser  # it has no types
    args: Namespace = make_arg_parser(make_parser()).parse_args([])
    return args


def serve_args(profile: ModelProfile) -> Namespace:
    """The arguments that ``vllm serve`` would have for this model."""
    args = default_args()
    args.model = args.model_tag = profile.path
    args.served_model_name = [profile.name]
    args.enable_log_requests = False
    args.disable_log_stats = True
    args.skip_mm_profiling = True
    # vLLM's own has random parts: no two gateways would have the same.
    args.fingerprint_mode, args.fingerprint_value = "custom", profile.fingerprint
    for name, value in profile.arguments.items():
        setattr(args, name, value)
    return args


def model_state(profile: ModelProfile, queue: YardQueue) -> tuple[Namespace, QueueEngineClient]:
    """Read a model's configuration, tokenizer and templates; takes up to a second."""
    args = serve_args(profile)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_model_config()
    config.quantization = None  # only weights need it
    vllm_config = VllmConfig(
        model_config=config,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    return args, QueueEngineClient(profile.name, vllm_config, queue, profile.stated)


class FrontEnds:
    """vLLM's FastAPI app, and the state of each model it serves."""

    def __init__(self, queue: YardQueue) -> None:
        self._queue = queue
        self._states: dict[str, State] = {}
        self._loading: dict[str, asyncio.Future[State]] = {}
        self.app = _build()
        self.app.state = _CurrentState(self.app.state)  # type: ignore[assignment]

    async def state_of(self, profile: ModelProfile) -> State:
        """The state of a model; made once, in a thread."""
        state = self._states.get(profile.name)
        if state is not None:
            return state
        loading = self._loading.get(profile.name)
        if loading is None:
            loading = asyncio.ensure_future(self._load(profile))
            self._loading[profile.name] = loading
        return await asyncio.shield(loading)

    async def _load(self, profile: ModelProfile) -> State:
        try:
            args, engine_client = await asyncio.to_thread(model_state, profile, self._queue)
            state = State()
            state.server = None
            await init_app_state(engine_client, state, args, TASKS)
            derived.replace_clocks()  # of what was imported for it
            self._states[profile.name] = state
            return state
        finally:
            self._loading.pop(profile.name, None)


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
    return build_app(args, TASKS)
