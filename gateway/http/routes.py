"""Routes: the handler of each method and path, and what the OpenAPI document says of it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from starlette.datastructures import Headers, QueryParams
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from gateway.http.errors import GatewayError, as_json, invalid
from gateway.http.principal import Principal
from gateway.http.sse import send_body


@dataclass(frozen=True, slots=True)
class Call:
    """A request for an endpoint."""

    scope: Scope
    receive: Receive
    send: Send
    principal: Principal = field(default_factory=Principal)
    #: The parameters of the path.
    params: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path of its URL."""
        path: str = self.scope["path"]
        return path

    @property
    def headers(self) -> Headers:
        """The headers of the request."""
        return Headers(scope=self.scope)

    async def answer(self, body: dict[str, Any]) -> None:
        """Answer with JSON."""
        await send_body(self.send, 200, as_json(body))

    @property
    def query(self) -> dict[str, str]:
        """The parameters of its URL; of one that is given twice, the last."""
        return dict(QueryParams(self.scope["query_string"]))


#: In the order of the header ``Allow``.
_METHODS: Final = ("GET", "POST", "DELETE")
Handler = Callable[[Call], Awaitable[None]]
Method = Callable[[Any, Call], Awaitable[None]]
Register = Callable[[Method], Method]


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint.

    Types and functions are named: they are those of `gateway.frontend.schemas`, which takes
    seconds to import.
    """

    method: str
    path: str
    name: str  # of its handler
    text: str
    tag: str
    body: str = ""  # the type of the body
    answer: str = ""  # the type of the answer; "": bytes of ``media_type``
    media_type: str = "application/json"
    takes: tuple[str, ...] = ()  # functions whose parameters are headers, query or form
    is_stream: bool = False  # may answer with events
    is_binary: bool = False  # may answer with bytes
    is_open: bool = False  # served without a key, and while the gateway stops


class Routes:
    """The routes of one class of handlers, whose names and docstrings they have."""

    def __init__(self) -> None:
        self._routes: list[Route] = []

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def __call__(self, served: str, tag: str, **form: Any) -> Register:
        """Register the decorated handler for ``served``, a method and a path.

        ``form`` are other fields of `Route`.
        """
        method, path = served.split()

        def register(handler: Method) -> Method:
            name, text = handler.__name__, str(handler.__doc__)
            self._routes.append(Route(method, path, name, text, tag, **form))
            return handler

        return register


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path that is served, with the routes and handlers of its methods."""

    path: str
    pattern: re.Pattern[str]
    served: dict[str, tuple[Route, Handler]] = field(default_factory=dict)


class Router:
    """Finds the handler of a request.

    Starlette's would answer a wrong method with the methods of one route only, and redirect to an
    absolute URL, whose scheme is wrong behind a proxy that ends TLS.
    """

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}

    @property
    def routes(self) -> Sequence[Route]:
        """All routes."""
        return [one for end in self._endpoints.values() for one, _ in end.served.values()]

    def add(self, routes: Iterable[Route], handler_of: Callable[[str], Handler]) -> None:
        """Serve routes with the handlers of their names."""
        for one in routes:
            pattern, path, _ = compile_path(one.path)
            endpoint = self._endpoints.setdefault(path, Endpoint(path, pattern))
            endpoint.served[one.method] = one, handler_of(one.name)

    def find(self, path: str) -> tuple[Endpoint | None, dict[str, str]]:
        """The endpoint of a path, and the parameters in it."""
        for one in self._endpoints.values():
            if found := one.pattern.match(path):
                return one, found.groupdict()
        return None, {}

    def redirect(self, scope: Scope) -> None:
        """Raises `GatewayError` with the place that was meant by a path with a slash too many."""
        bare = scope["path"].rstrip("/")
        if bare != scope["path"] and self.find(bare)[0]:
            query = scope["query_string"].decode("latin-1")
            place = {"location": quote(bare) + (f"?{query}" if query else "")}
            message = f"this is at {bare}"
            raise GatewayError(307, message, extra_headers=place)

    def refusal(self, method: str, path: str) -> GatewayError:
        """The error for what is not served: 405 where the path has other methods, else 404."""
        endpoint, _ = self.find(path)
        if endpoint and method not in endpoint.served:
            allowed = ", ".join(sorted(endpoint.served, key=_METHODS.index))
            message = f"{path} has {allowed}, not {method}"
            headers = {"allow": allowed}
            return GatewayError(405, message, extra_headers=headers)
        # A base URL may have one `/v1` too few or too many.
        others = (one for one in (f"/v1{path}", path.removeprefix("/v1")) if self.find(one)[0])
        meant = next(others, "")
        hint = f"did you mean {meant}?" if meant else "see GET /openapi.json"
        return GatewayError(404, f"there is no {method} {path}; {hint}")


# Lists by pages, as their queries ask for them.

_MOST_ITEMS: Final = 100
_USUAL_ITEMS: Final = 20

Item = dict[str, Any]


def page(items: list[Item], query: Mapping[str, str], *bounds: int) -> Item:
    """One page of a list, see `cut`; raises `GatewayError`."""
    return as_list(*cut(items, query, *bounds))


def cut(
    items: list[Item], query: Mapping[str, str], usual: int = _USUAL_ITEMS, most: int = _MOST_ITEMS
) -> tuple[list[Item], bool]:
    """The items of a page, and whether there are more; raises `GatewayError`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "give `asc` or `desc`")
    limit = number_in(query, "limit", usual)
    if not 1 <= limit <= most:
        raise invalid("limit", f"give 1 to {most}")
    ordered = items if order == "asc" else items[::-1]
    if "after" in query:
        ids = [item["id"] for item in ordered]
        if query["after"] not in ids:
            raise invalid("after", "there is no such item")
        ordered = ordered[ids.index(query["after"]) + 1 :]
    return ordered[:limit], len(ordered) > limit


def as_list(data: list[Item], has_more: bool) -> Item:
    """The list object of OpenAI's API."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def number_in(query: Mapping[str, str], name: str, default: int) -> int:
    """A number that is not negative; raises `GatewayError`."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise invalid(name, "give a number that is not negative")
    return int(text)


def is_true(query: Mapping[str, str], name: str) -> bool:
    """A truth value; raises `GatewayError`."""
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise invalid(name, "give `true` or `false`")
    return text in ("true", "1")
