"""How a body comes to vLLM's app: validated up to its first fault, and aside if it is large.

FastAPI validates, and vLLM's handlers render, in the event loop. A list of a thousand wrong items
would give hundreds of errors for each, of which the answer names ten; a long chat takes a second.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRoute, request_response
from pydantic_core import SchemaValidator
from pydantic_core.core_schema import dict_schema, no_info_after_validator_function
from starlette import responses
from starlette.requests import Request
from starlette.responses import Response
from transformers.utils import chat_template_utils

from gateway.frontend.derived import module_with
from gateway.frontend.params import check_asked
from gateway.frontend.side import SideLoop, at_home
from gateway.http.context import CURRENT
from gateway.http.incoming import (
    BODY,
    ParsedBody,
    check_body,
    dumps_in_python,
    has_few_items,
    is_small,
)

_SEQUENCES: Final = ("list", "set", "frozenset", "tuple")
_IN_OLDER: Final = "fail_fast" not in inspect.signature(dict_schema).parameters
_PLAIN: Final = ("int", "float", "bool", "str", "any", "none")

#: Models inside a body are validated by the changed schema, too, not as their classes are.
_OWN: Final[dict[str, Any]] = (
    {"_use_prebuilt": False} if "_use_prebuilt" in str(SchemaValidator.__text_signature__) else {}
)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def open_door(app: FastAPI, max_grammar_bytes: int) -> None:
    """Change how the handlers of vLLM's app get a body, and how they write a large answer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    side = SideLoop()
    for module in (chat_template_utils, responses):
        vars(module)["json"] = module_with(json, dumps=dumps)
    # vLLM's own code makes one of a body for Anthropic's API.
    ChatCompletionRequest.__pydantic_validator__ = _validator(
        ChatCompletionRequest.__pydantic_core_schema__
    )
    for route in app.routes:
        if isinstance(route, APIRoute) and route.dependant.body_params:
            for field in route.dependant.body_params:
                adapter: Any = field._type_adapter  # noqa: SLF001 - FastAPI has no other way to it
                adapter.validator = _validator(adapter.core_schema)
            route.app = request_response(_door(route.get_route_handler(), side, max_grammar_bytes))


def _door(handler: Handler, side: SideLoop, max_grammar_bytes: int) -> Handler:
    async def handle(request: Request) -> Response:
        raw = await request.body()
        body: ParsedBody | None = request.scope.get(BODY)
        if body is None:
            check_body(raw)
        else:
            # Where Starlette keeps them.
            request._json, request._form = body.value, body.form  # noqa: SLF001
        if is_small(raw):
            return await handler(request)
        receive = request.receive
        request._receive = lambda: at_home(receive())  # type: ignore[arg-type]  # noqa: SLF001
        return await side.run(_client(body), len(raw), lambda: handle_large(request))

    async def handle_large(request: Request) -> Response:
        check_asked(await request.json(), max_grammar_bytes)
        return await handler(request)

    return handle


def _client(body: ParsedBody | None) -> str:
    """Whose turn a body is: the tenant's, or the client's."""
    if body is not None:
        return body.client
    context = CURRENT.get()
    return "" if context is None else context.tenant or context.client


def _validator(schema: Any) -> SchemaValidator:
    return SchemaValidator(_bounded(schema), **_OWN)


def _bounded(schema: Any) -> Any:
    """A schema whose lists and dictionaries end at their first fault, and give way to threads."""
    schema = copy.copy(schema)
    if isinstance(schema, list):
        return [_bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    for key, value in schema.items():
        if key not in ("metadata", "default", "serialization"):
            schema[key] = _bounded(value)
    kind = schema.get("type")
    if kind in _SEQUENCES or (kind == "dict" and not _IN_OLDER):
        schema["fail_fast"] = True
        inner = "values_schema" if kind == "dict" else "items_schema"
        items = schema.get(inner)
        if isinstance(items, dict) and items["type"] not in _PLAIN:
            schema[inner] = no_info_after_validator_function(_same, items)
    return schema


def dumps(value: Any, **options: Any) -> str:
    """``json.dumps``, for which a large value beside the event loop is no single call of C's.

    C's is more than twice as fast, and holds the interpreter until the end.
    """
    is_of_small = threading.current_thread() is threading.main_thread()
    by_c = is_of_small or has_few_items(value)
    return (json.dumps if by_c else dumps_in_python)(value, **options)


def _same(value: Any) -> Any:
    """A call of Python in a list that is validated, at which other threads may go on."""
    return value
