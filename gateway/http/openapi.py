"""The OpenAPI document of the gateway: what it serves, and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi

import tokenyard


class OpenApiDocument:
    """Written in a thread when the first client asks: it takes a second."""

    def __init__(self, *routers: APIRouter, needs_key: bool) -> None:
        self._routers = routers
        self._needs_key = needs_key
        self._lock = asyncio.Lock()
        self._written: bytes | None = None

    async def read(self) -> bytes:
        """The document as JSON."""
        async with self._lock:
            if self._written is None:
                document = await asyncio.to_thread(describe, *self._routers)
                if self._needs_key:
                    _require_key(document)
                self._written = json.dumps(document).encode()
            return self._written


def describe(*routers: APIRouter) -> dict[str, Any]:
    """The document over the routes of some routers."""
    return get_openapi(
        title="Tokenyard",
        version=tokenyard.__version__,
        summary="OpenAI's and Anthropic's APIs over a yard.",
        routes=[route for router in routers for route in router.routes],
    )


def _require_key(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
