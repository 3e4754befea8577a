"""The OpenAPI document of the gateway: what it serves, and nothing else."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Iterable
from typing import Any, Final

from fastapi import Depends
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response

import tokenyard
from gateway.http.errors import is_of_messages
from gateway.http.routes import Route

_BYTES: Final = {
    "content": {"application/octet-stream": {}},
    "description": "The numbers as bytes, with such an `encoding_format`",
}
_EVENTS: Final = {"content": {"text/event-stream": {}}, "description": "Events, with `stream`"}


class OpenApiDocument:
    """Written in a thread when the first client asks: that takes seconds."""

    def __init__(self, routes: Iterable[Route], *, needs_key: bool) -> None:
        self._routes = routes
        self._needs_key = needs_key
        self._lock = asyncio.Lock()
        self._written: bytes | None = None

    async def read(self) -> bytes:
        """The document as JSON."""
        async with self._lock:
            if self._written is None:
                document = await asyncio.to_thread(
                    describe, self._routes, needs_key=self._needs_key
                )
                self._written = json.dumps(document).encode()
            return self._written


def describe(routes: Iterable[Route], *, needs_key: bool) -> dict[str, Any]:
    """The document."""
    document = get_openapi(
        title="Tokenyard",
        version=tokenyard.__version__,
        summary="OpenAI's and Anthropic's APIs over a yard.",
        routes=[_described(one) for one in routes],
    )
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _without_null(parameter["schema"])
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _described(route: Route) -> APIRoute:
    """The route as FastAPI describes it."""
    # Hundreds of types of vLLM's are read for it, which the start of a gateway need not wait for.
    from gateway.frontend import schemas

    kind, types = inspect.Parameter.KEYWORD_ONLY, dict[str, Any]()
    for name in re.findall(r"{(\w+)", route.path):
        types[name] = schemas.PATH_PARAMETERS[name]
    if route.body:
        types["body"] = getattr(schemas, route.body)

    def endpoint() -> None:
        """Has the signature that FastAPI reads."""

    vars(endpoint)["__signature__"] = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=one) for name, one in types.items()]
    )
    error = "AnthropicError" if is_of_messages(route.path) else "ErrorAnswer"
    responses: dict[int | str, dict[str, Any]] = {
        "default": {"model": getattr(schemas, error), "description": "An error"}
    }
    if route.is_stream:
        responses[200] = _EVENTS
    elif route.is_binary:
        responses[200] = _BYTES
    elif not route.answer:
        responses[200] = {"content": {route.media_type: {}}, "description": "The content"}
    return APIRoute(
        route.path,
        endpoint,
        methods=[route.method],
        name=route.name,
        description=route.text,
        tags=[route.tag],
        dependencies=[Depends(getattr(schemas, one)) for one in route.takes],
        response_model=getattr(schemas, route.answer) if route.answer else None,
        response_class=JSONResponse if route.answer else Response,
        responses=responses,
        openapi_extra={"security": []} if route.is_open else None,
    )


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The form of a header or a parameter: it may be left out, but has no null."""
    rest = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(rest) != 1:
        return schema
    form: dict[str, Any] = rest[0]
    return form | {name: value for name, value in schema.items() if name != "anyOf"}
