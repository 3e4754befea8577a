"""The OpenAPI document of the gateway: what it serves, and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi.openapi.utils import get_openapi

import tokenyard


class OpenApiDocument:
    """Written in a thread when the first client asks: that takes seconds."""

    def __init__(self, *, needs_key: bool) -> None:
        self._needs_key = needs_key
        self._lock = asyncio.Lock()
        self._written: bytes | None = None

    async def read(self) -> bytes:
        """The document as JSON."""
        async with self._lock:
            if self._written is None:
                document = await asyncio.to_thread(describe, needs_key=self._needs_key)
                self._written = json.dumps(document).encode()
            return self._written


def describe(*, needs_key: bool) -> dict[str, Any]:
    """The document."""
    # Hundreds of types of vLLM's are read for them, which the start of a gateway need not wait for.
    from gateway.frontend import endpoints as rendered
    from gateway.http import endpoints as own

    document = get_openapi(
        title="Tokenyard",
        version=tokenyard.__version__,
        summary="OpenAI's and Anthropic's APIs over a yard.",
        routes=[*rendered.router.routes, *own.router.routes],
    )
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _without_null(parameter["schema"])
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The form of a header or a parameter: it may be left out, but has no null."""
    rest = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(rest) != 1:
        return schema
    return {**rest[0], **{name: value for name, value in schema.items() if name != "anyOf"}}
