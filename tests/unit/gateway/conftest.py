"""vLLM's objects for tests of what the gateway makes of them; imported only where a test runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from gateway.batches.storage import FolderStorage, Storage
from gateway.server import open_board
from tests.engines.harness import MODELS
from tests.support.builders import random_name
from tests.support.s3 import needs_s3, running_s3
from tokenyard.protocol.gateway_settings import GatewaySettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreRequest

NOWHERE = "redis://127.0.0.1:1"


def vllm_params(**given: Any) -> SamplingParams:
    """Sampling parameters as vLLM's front end makes them."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import SamplingParams

    return SamplingParams(**given)


@cache
def adder_tokenizer() -> TokenizerLike:
    """The tokenizer of the smallest example."""
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(MODELS / "adder")


@asynccontextmanager
async def lone_gateway(**given: Any) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """A gateway that nobody connects to a broker, and a client of its own."""
    adder_tokenizer()  # sets vLLM's environment first
    from gateway.app import Gateway
    from gateway.frontend.models import FrontEnds
    from gateway.models import ModelWatch
    from gateway.queue.yard import YardQueue

    settings = GatewaySettings(redis_url=NOWHERE, **given)
    queue = YardQueue(NOWHERE, "nowhere")
    front_ends = FrontEnds(queue)
    watch = ModelWatch(queue, front_ends, settings.refresh_s)
    board = open_board(settings)
    health: Any = SimpleNamespace(lost="")
    app: Any = Gateway(settings, queue, front_ends, watch, health, None, board)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield app, client
    if board is not None:
        board.close()


def core_request(params: SamplingParams, prompt: list[int]) -> EngineCoreRequest:
    """A request as vLLM's input processor makes it."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id="cmpl-1",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@pytest.fixture(scope="session")
def s3_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server of S3, found by these variables."""
    with running_s3(tmp_path_factory.mktemp("s3") / "server.log") as variables:
        yield variables


@pytest.fixture
def s3(s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty folder in a bucket."""
    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://yard/{random_name('files')}"


@pytest.fixture(params=["folder", pytest.param("s3", marks=needs_s3)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Each kind of storage, empty."""
    if request.param == "folder":
        return FolderStorage(tmp_path / "files")
    from gateway.batches.s3 import S3Storage

    return S3Storage(request.getfixturevalue("s3"))
