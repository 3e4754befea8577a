"""What comes with a request: its body, which is given to vLLM's app again, and its headers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from gateway.http.errors import GatewayError, invalid, unavailable
from tokenyard.protocol.gateway_settings import MAX_BODY_ITEMS, GatewaySettings
from tokenyard.protocol.wire import MAX_STREAM_INTERVAL_MS

#: The paths whose body is a form with a file of sound.
TRANSCRIBING: Final = "/v1/audio/transcriptions", "/v1/audio/translations"
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_STRUCTURE: Final = b'"[]{},:'
_OTHER: Final = bytes(set(range(256)) - set(_STRUCTURE))
#: How much is looked at in one call, for other threads to have the interpreter in between.
_PIECE: Final = 64 * 1024
#: Values that a list, an object, or a member of one counts for: it takes so much more memory and
#: time to read, to validate and to write than a number of a list.
_WEIGHT: Final = 4
#: How deep values of a body may be nested: deeper than any schema of a tool.
MAX_DEPTH: Final = 128
_MOST_FIELDS: Final = 64
_TRUTHS: Final = {"true": True, "false": False}
_SMALL_BYTES: Final = 16 * 1024
_SMALL_ITEMS: Final = 100
#: Values that are decoded in a few milliseconds.
_FEW_ITEMS: Final = 10_000
_NESTING: Final = frozenset({dict, list, tuple})
#: Headers of a request that its inner one has as its own.
_REPLACED: Final = (b"content-length", b"content-type", b"x-request-id")

#: Longest time that a client may give.
_MOST_MS: Final = 10**10
_MOST_DIGITS: Final = len(str(_MOST_MS))


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """The body of a request as vLLM's app finds it in its scope."""

    value: dict[str, Any]
    is_small: bool
    #: Who waits while it is rendered: the tenant, or the client.
    client: str
    #: What it was, where it was no JSON; of its file, `value` has a digest.
    form: FormData | None = None


#: Where a scope has its `ParsedBody`.
BODY: Final = "tokenyard.body"


class Bodies:
    """Reads bodies, of which not too many bytes may be unfinished at a time.

    A client may have a quarter of them.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._limit = settings.max_body_bytes
        self._most = settings.max_unfinished_bytes
        self._most_items = settings.max_body_items
        self._unfinished: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, receive: Receive, client: str, most_bytes: int | None = None) -> bytes:
        """The whole body; raises `GatewayError` where it is too large or the client is gone.

        ``most_bytes`` is in the place of ``max_body_bytes``.
        """
        limit = most_bytes or self._limit
        parts, size = [], 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise GatewayError(499, "the client disconnected")
                part = message.get("body", b"")
                parts.append(part)
                size += len(part)
                self._unfinished[client] += len(part)
                if size > limit:
                    raise too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(parts)
                self._check(client)
        finally:
            self._unfinished[client] -= size
            if not self._unfinished[client]:
                del self._unfinished[client]

    async def parse(self, raw: bytes, client: str) -> ParsedBody:
        """`parse_body`, in a thread if it is large, and one at a time for each client."""
        if is_small(raw):
            return ParsedBody(parse_body(raw, self._most_items), is_small=True, client=client)
        async with self._turns.setdefault(client, asyncio.Lock()):
            value = await asyncio.to_thread(parse_body, raw, self._most_items)
        return ParsedBody(value, is_small=False, client=client)

    async def parse_form(self, raw: bytes, scope: Scope, client: str) -> ParsedBody:
        """A form with a file, in a thread; raises `GatewayError`."""
        require_form(Headers(scope=scope))
        async with self._turns.setdefault(client, asyncio.Lock()):
            value, form = await asyncio.to_thread(asyncio.run, _read_form(raw, scope))
        return ParsedBody(value, is_small=False, client=client, form=form)

    def _check(self, client: str) -> None:
        if self._unfinished[client] > self._most // 4:
            message = "too many bytes of your requests are unfinished; send fewer at a time"
            raise GatewayError(429, message, retry_after_s=1.0)
        if self._unfinished.total() > self._most:
            raise unavailable("too many bytes of requests are unfinished")


def too_large(limit: int) -> GatewayError:
    """The refusal of a body that has too many bytes."""
    return GatewayError(413, f"the body has more than {limit} bytes")


def is_small(raw: bytes) -> bool:
    """Whether a body can be parsed, validated and rendered within milliseconds."""
    return len(raw) <= _SMALL_BYTES and raw.count(b"{") + raw.count(b"[") <= _SMALL_ITEMS


def has_few_items(value: Any) -> bool:
    """Whether C's ``json.dumps`` writes a value in a few milliseconds; a text is one item."""
    left, nested = _FEW_ITEMS, list[Any]([(value,)])
    while nested and left > 0:
        one = nested.pop()
        items = [*one.values()] if isinstance(one, dict) else one
        left -= len(items)
        nested += [item for item in items if type(item) in _NESTING]
    return left > 0


def dumps_in_python(value: Any, **options: Any) -> str:
    """``json.dumps``, which lets other threads go on in the midst of a large value."""
    return "".join(json.JSONEncoder(**options).iterencode(value))


def require_json(headers: Headers) -> None:
    """Raises `GatewayError`, as vLLM's server does: a page may send other types to other sites."""
    if _media_type(headers) != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise GatewayError(400, message)


def require_form(headers: Headers) -> None:
    """Raises `GatewayError` for a body that is no form with a file."""
    if _media_type(headers) != "multipart/form-data":
        raise GatewayError(400, "give a form (multipart/form-data) with `file` and `model`")


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").lower().split(";", maxsplit=1)[0]


async def _read_form(raw: bytes, scope: Scope) -> tuple[dict[str, Any], FormData]:
    """A form, and as JSON would have it; raises `GatewayError`."""
    request = Request(scope, _in_pieces(raw))
    try:
        form = await request.form(max_files=1, max_fields=_MOST_FIELDS)
    except MultiPartException as error:
        raise GatewayError(400, f"the body is no such form: {error.message}") from error
    return {name: await _told(form.getlist(name)) for name in form}, form


async def _told(values: Sequence[UploadFile | str]) -> Any:
    """Of a field of a form: its value as JSON would have it, of a file its digest."""
    told: list[Any] = []
    for one in values:
        if isinstance(one, str):
            told.append(_TRUTHS.get(one.lower(), one))
        else:
            told.append(hashlib.sha256(await one.read()).hexdigest())
            await one.seek(0)
    return told[0] if len(told) == 1 else told


def _in_pieces(raw: bytes) -> Receive:
    """A `receive` that gives a body so that nobody holds the interpreter for long."""
    starts = iter(range(0, len(raw), _PIECE))

    async def receive() -> Message:
        start = next(starts, 0)
        end = start + _PIECE
        return {"type": "http.request", "body": raw[start:end], "more_body": end < len(raw)}

    return receive


def parse_body(raw: bytes, max_items: int = MAX_BODY_ITEMS) -> dict[str, Any]:
    """The JSON object of a body; raises `GatewayError`."""
    check_body(raw, max_items)
    try:
        body = json.loads(raw, cls=None if raw.count(b",") < _FEW_ITEMS else _DecoderInPython)
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise GatewayError(400, "the body is not a JSON object")
    if _SURROGATE.search(raw) is not None and not _is_unicode(body):
        raise GatewayError(400, "a text in the body is not Unicode")
    return body


class _DecoderInPython(json.JSONDecoder):
    """Lets other threads go on in the midst of a large body, as the one in C does not: 0.2 s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scan_once = py_make_scanner(self)


def check_body(raw: bytes, max_items: int = MAX_BODY_ITEMS) -> None:
    """Raises `GatewayError` where a body has too many values, or they are nested too deep."""
    if raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH and _items(raw) <= max_items:
        return  # even if none of them stands in a text
    found, items = [], 0
    for piece in _outside_texts(raw):
        found.append(piece)
        items += _items(piece)
        if items > max_items:
            message = (
                f"the body has more than {max_items} values, of which each list, object and member "
                f"of an object counts for {_WEIGHT}"
            )
            raise GatewayError(413, message)
    nested = b"".join(found).translate(None, b",:")
    for _ in range(MAX_DEPTH):
        before, nested = nested, nested.replace(b"[]", b"").replace(b"{}", b"")
        if nested == before:
            return
    if nested:
        message = f"the body is nested more than {MAX_DEPTH} levels deep"
        raise GatewayError(400, message)


def _items(text: bytes) -> int:
    """The values of a text of JSON by the limit's measure, at most."""
    heavy = sum(text.count(one) for one in (b"{", b"[", b":"))
    return text.count(b",") + _WEIGHT * heavy


def _outside_texts(raw: bytes) -> Iterator[bytes]:
    """The brackets, commas and colons of JSON that do not stand in a text, in order."""
    # Without escapes, every quotation mark begins or ends a text.
    marks = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER)
    is_inside = 0
    for start in range(0, len(marks), _PIECE):
        parts = marks[start : start + _PIECE].split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= (len(parts) - 1) % 2


def refuse_beam_search(body: dict[str, Any]) -> None:
    """Raises `GatewayError`: each token of each beam would be a request that nobody resumes."""
    if body.get("use_beam_search") not in (None, False):
        raise invalid("use_beam_search", "beam search is not supported")


def _is_unicode(body: dict[str, Any]) -> bool:
    """JSON may escape half of a surrogate pair, which nobody behind the gateway could write."""
    try:
        msgspec.json.encode(body)
    except UnicodeEncodeError:
        return False
    return True


def with_file_urls(items: Any) -> Any:
    """The items of a conversation, with the ids of files that are media in the place of URLs.

    OpenAI's form of such a part is ``input_image`` with ``file_id``, Anthropic's an image with a
    source of type ``file``.
    """
    if isinstance(items, list):
        return [with_file_urls(one) for one in items]
    if not isinstance(items, dict):
        return items
    source = items.get("source")
    if items.get("type") == "input_image" and items.get("file_id") is not None:
        rest = {name: value for name, value in items.items() if name != "file_id"}
        return {**rest, "image_url": items["file_id"]}
    if items.get("type") == "image" and isinstance(source, dict) and source.get("type") == "file":
        return {**items, "source": {"type": "url", "url": source.get("file_id")}}
    return {**items, "content": with_file_urls(items["content"])} if "content" in items else items


def replay(raw: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then what the connection brings."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return again


def inner_scope(path: str, durable_id: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Scope:
    """The scope of a POST to vLLM's app that no client sent in this form."""
    kept = [one for one in headers if one[0] not in _REPLACED]
    own = [(b"content-type", b"application/json"), (b"x-request-id", durable_id.encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*kept, *own],
        "client": None,
        "server": None,
    }


def read_event_id(text: str) -> tuple[str, int]:
    """Durable id and number of an event; raises `GatewayError`."""
    name, _, number = text.partition(":")
    if len(name) != 32 or not number.isascii() or not number.isdecimal() or len(number) > 9:
        raise invalid("Last-Event-ID", "this is not the id of an event of this server")
    return name, int(number)


def read_choice(headers: Headers, name: str, usual: str, other: str) -> str:
    """One of two values of a header; raises `GatewayError`."""
    given = headers.get(name, usual)
    if given not in (usual, other):
        message = f"{name}: give `{usual}` or `{other}`"
        raise GatewayError(400, message, param=name)
    return given


def read_interval(headers: Headers, usual: int | None) -> int | None:
    """Least ms between the events of a stream; raises `GatewayError`."""
    given = _read_ms(headers, "X-Tokenyard-Stream-Interval-Ms", 0, MAX_STREAM_INTERVAL_MS)
    return usual if given is None else given


def read_deadline(headers: Headers, body: dict[str, Any], now_ms: float) -> int | None:
    """Unix ms by the broker after which the answer is of no use; raises `GatewayError`.

    The header counts in milliseconds, the field ``timeout`` of the body in seconds.
    """
    given = _read_ms(headers, "X-Request-Timeout-Ms", 1, _MOST_MS)
    if given is not None:
        return int(now_ms) + given
    seconds = body.get("timeout")
    if seconds is None:
        return None
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds * 1000 <= _MOST_MS:
        raise invalid("timeout", f"give seconds, at most {_MOST_MS // 1000:,}")
    return int(now_ms) + math.ceil(float(seconds) * 1000)


def _read_ms(headers: Headers, name: str, least: int, most: int) -> int | None:
    given = headers.get(name.lower())
    if given is None:
        return None
    # Python refuses to read thousands of digits.
    is_number = given.isascii() and given.isdecimal() and len(given) <= _MOST_DIGITS
    if not is_number or not least <= int(given) <= most:
        raise invalid(name, f"give {least:,} to {most:,} milliseconds")
    return int(given)
