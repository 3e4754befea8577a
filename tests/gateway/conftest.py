"""Gateways of the one yard with real vLLM, and clients for them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.gateway.stand import Door, Stand


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """For all clients, and calls like `httpx.get`: one of its own takes 30 ms of a core."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("httpx", "httpx2"):
            transports = importlib.import_module(f"{module}._transports.default")
            shared = functools.cache(transports.create_ssl_context)
            patch.setattr(transports, "create_ssl_context", shared)
        yield


@pytest.fixture(scope="session")
def vllm(stand: Stand) -> str:
    """The URL of vLLM's own server, which has started with the yard."""
    assert stand.own_server is not None
    return stand.own_server.url


@pytest.fixture
def door(stand: Stand) -> Door:
    """A gateway that serves."""
    return stand.door(0)


@pytest.fixture
def other_door(stand: Stand) -> Door:
    """A second one, which shares nothing with the first but the broker."""
    return stand.door(1)


@pytest.fixture
def sdk(door: Door) -> Iterator[OpenAI]:
    """OpenAI's SDK at the first gateway."""
    with OpenAI(base_url=f"{door.url}/v1", api_key="none", timeout=90.0, max_retries=0) as client:
        yield client


@pytest.fixture
def http(door: Door) -> Iterator[httpx.Client]:
    """Plain HTTP to the first gateway."""
    with httpx.Client(base_url=door.url, timeout=60.0) as client:
        yield client
