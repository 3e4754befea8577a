"""How a body comes to vLLM's app: validated up to its first fault, and aside if it is large.

FastAPI validates, and vLLM's handlers render, in the event loop. A list of a thousand wrong items
would give hundreds of errors for each, of which the answer names ten; a long chat takes a second.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRoute, request_response
from pydantic_core import SchemaValidator
from pydantic_core.core_schema import no_info_after_validator_function
from starlette.requests import Request
from starlette.responses import Response

from gateway.frontend.side import SideLoop, at_home
from gateway.http.context import CURRENT
from gateway.http.incoming import BODY, Body, check_body, is_small

_SEQUENCES: Final = ("list", "set", "frozenset", "tuple")
_PLAIN: Final = ("int", "float", "bool", "str", "any", "none")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def open_door(app: FastAPI) -> None:
    """Change how the handlers of vLLM's app get a body."""
    side = SideLoop()
    for route in app.routes:
        if isinstance(route, APIRoute) and route.dependant.body_params:
            for field in route.dependant.body_params:
                adapter: Any = field._type_adapter  # noqa: SLF001 - FastAPI has no other way to it
                adapter.validator = SchemaValidator(_bounded(adapter.core_schema))
            route.app = request_response(_door(route.get_route_handler(), side))


def _door(handler: Handler, side: SideLoop) -> Handler:
    async def handle(request: Request) -> Response:
        raw = await request.body()
        body: Body | None = request.scope.get(BODY)
        if body is None:
            check_body(raw)
        else:
            request._json = body.value  # noqa: SLF001 - where Starlette keeps it
        if is_small(raw):
            return await handler(request)
        receive = request.receive
        request._receive = lambda: at_home(receive())  # type: ignore[arg-type]  # noqa: SLF001
        return await side.run(_client(body), len(raw), lambda: handler(request))

    return handle


def _client(body: Body | None) -> str:
    """Whose turn a body is: the tenant's, or the client's."""
    if body is not None:
        return body.client
    context = CURRENT.get()
    return "" if context is None else context.tenant or context.client


def _bounded(schema: Any) -> Any:
    """A schema of pydantic-core whose lists end at their first fault, and give way to threads."""
    schema = copy.copy(schema)
    if isinstance(schema, list):
        return [_bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    for key, value in schema.items():
        if key not in ("metadata", "default", "serialization"):
            schema[key] = _bounded(value)
    if schema.get("type") in _SEQUENCES:
        schema["fail_fast"] = True
        items = schema.get("items_schema")
        if isinstance(items, dict) and items["type"] not in _PLAIN:
            schema["items_schema"] = no_info_after_validator_function(_same, items)
    return schema


def _same(value: Any) -> Any:
    """A call of Python in a list that is validated, at which other threads may go on."""
    return value
