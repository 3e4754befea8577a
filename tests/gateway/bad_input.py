"""What a client may send that means harm, or does not know better: bodies, heads and URLs.

`draw` gives the same for the same number.
"""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final
from urllib.parse import quote

from tests.gateway.asked import LONG_TOOL, PLACE, say

_COMMON: Final[dict[str, Any]] = {
    "model": "speaker",
    "stream": True,
    "temperature": 0,
    "stop": ["stop"],
    "seed": 1,
    "user": "me",
    "request_id": "one",
    "cache_salt": "salt",
    "vllm_xargs": {"name": "value"},
    "structured_outputs": {"regex": "[ab]{1,4}"},
    "metadata": {"name": "value"},
}
GOOD: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": _COMMON | {"prompt": ["abc", "xyz"], "max_tokens": 5, "logprobs": 1},
    "/v1/chat/completions": _COMMON
    | {"messages": say("abc"), "tools": [LONG_TOOL], "tool_choice": "auto", "max_tokens": 5},
    "/v1/responses": _COMMON | {"input": say("abc"), "instructions": "say", "max_output_tokens": 5},
    "/v1/messages": _COMMON
    | {"messages": say("abc"), "system": "say", "stop_sequences": ["stop"], "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "speaker", "messages": say("abc"), "system": "say"},
    "/tokenize": {"model": "speaker", "prompt": "abc"},
    "/detokenize": {"model": "speaker", "tokens": [65, 66]},
}
#: What a request needs to be accepted.
CORES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": say("abc")},
    "/v1/completions": {"prompt": "abc"},
    "/v1/responses": {"input": "abc"},
    "/v1/messages": {"messages": say("abc"), "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": say("abc")},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [65, 66]},
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: Final = (
    *("", "\x00", "\ud800", "\udfff\ud800", "\ufeff", "\u202e", "\u2028", "e" + 300 * "\u0301"),
    *("data: [DONE]\n\n", "\r\n\r\n", "<|im_end|>\n<|im_start|>system\n", "</s>", "<s>" * 50),
    *("{{ 7 * 7 }}", "{% for x in range(10**9) %}{% endfor %}", "../../../etc/passwd", "file-x"),
    *("a" * 100_000, "(" * 500, "(a*)*b", "[" * 500, '{"a":' * 500, "\\u0000", "%s%n", "$ref"),
    *(0, -1, 2**31, 2**63, -(2**63) - 1, 10**300, 0.1, 1e308, -1e-308),
    *(float("nan"), float("inf"), -float("inf"), None, True, [], {}, [[]], [None]),
    *({"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}),
    *(nested(30), nested(400), {"a": nested(200)}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value inside a body."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for name, inner in pairs:
        found.append((*path, name))
        if isinstance(inner, dict | list):
            found += places(inner, (*path, name))
    return found


def put(body: Any, place: tuple[Any, ...], value: Any) -> None:
    """Replace the value at a place of a body."""
    *way, last = place
    for one in way:
        body = body[one]
    body[last] = value


def many(value: Any, size: int, most: int = 240_000) -> list[Any]:
    """So many times as a body of this size can hold."""
    return [value] * min(most, size // (len(json.dumps(value)) + 2))


#: A value that takes a body of so many bytes, in place of the one there.
BLOW_UPS: Final[Mapping[str, Callable[[Any, int], Any]]] = {
    "text": lambda _, size: "a b" * (size // 3),
    "word": lambda _, size: "a" * size,
    "letters": lambda _, size: "é" * (size // 6),
    "escapes": lambda _, size: '\u0001"\\' * (size // 10),
    "emoji": lambda _, size: "\U0001f468\u200d\U0001f469" * (size // 11),
    "specials": lambda _, size: "<|im_start|>" * (size // 12),
    "copies": many,
    "empty": lambda _, size: many({}, size),
    "texts": lambda _, size: many("a", size),
    "typed": lambda _, size: many({"type": "text", "text": "a"}, size),
    "untyped": lambda _, size: many({"type": "input_text", "text": 1}, size),
    "wrong": lambda _, size: many({"type": 1, "role": 1, "content": {}}, size),
    "messages": lambda _, size: many({"role": "user", "content": "a"}, size),
    "calls": lambda _, size: many(
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {}}]}, size
    ),
    "tools": lambda _, size: many(LONG_TOOL, size),
    "numbers": lambda _, size: many(65, size),
    "fractions": lambda _, size: many(0.1, size),
    "lists": lambda _, size: many([65], size),
    "fields": lambda value, size: {
        f"{n}": value for n in range(len(many([value, "1234567"], size)))
    },
    "nested": lambda _, size: many(nested(60), size),
    "digits": lambda _, size: _Raw("9" * size),
    "exponent": lambda _, size: _Raw("1" + "0" * size + "e-9"),
}


def _enum(size: int) -> Any:
    return {"enum": [f"{n:06}" for n in range(size // 10)]}


def _properties(size: int) -> Any:
    return {
        "type": "object",
        "properties": {f"f{n:06}": {"type": "string"} for n in range(size // 32)},
    }


def _chain(size: int) -> Any:
    names = [f"d{n:05}" for n in range(size // 40)]
    links = {one: {"$ref": f"#/$defs/{other}"} for one, other in pairwise(names)}
    return {"$defs": links | {"last": PLACE}, "$ref": "#/$defs/d00000"}


def _deep_schema(size: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(min(size // 40, 100)):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


SCHEMAS: Final = (_enum, _properties, _chain, _deep_schema)
#: Constraints on the text of so many bytes.
GRAMMARS: Final[Mapping[str, Callable[[int], Any]]] = {
    "enum": lambda size: {"json": _enum(size)},
    "properties": lambda size: {"json": _properties(size)},
    "chain": lambda size: {"json": _chain(size)},
    "deep": lambda size: {"json": _deep_schema(size)},
    "schema-in-text": lambda size: {"json": json.dumps(_properties(size))},
    "choice": lambda size: {"choice": [f"{n:06}" for n in range(size // 10)]},
    "long-choice": lambda size: {"choice": ["a" * size]},
    "regex": lambda size: {"regex": "(a|b)" * (size // 5)},
    "repeats": lambda size: {"regex": "a{1,999}" * max(1, size // 9)},
    "powers": lambda _: {"regex": "((((a{1,99}){1,99}){1,99}){1,99})"},
    "brackets": lambda size: {"regex": "(" * size},
    "rules": lambda size: {
        "grammar": "root ::= r0\n"
        + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(size // 20))
        + f'r{size // 20} ::= "b"\n'
    },
    "left-recursion": lambda _: {"grammar": "root ::= root | root root"},
    "tag": lambda size: {
        "structural_tag": json.dumps(
            {
                "type": "structural_tag",
                "structures": [
                    {"begin": f"<{n}>", "schema": PLACE, "end": "</>"} for n in range(size // 200)
                ],
                "triggers": ["<"],
            }
        )
    },
}
#: Header values.
_VALUES: Final = (
    *("", " ", "0", "-1", "1", "9" * 5000, "1e9", "nan", "null", "true", "on", "off", "cancel"),
    *("continue", "é", "\xff\xfe", "a" * 9000, "\t", '"'),
    *("*", "a,b", ";", "=?utf-8?q?a?=", "..", "0x1"),
    *("gzip", "chunked;q=1", "text/plain"),
    *("application/json", "multipart/form-data", "f" * 32 + ":1"),
    *("0" * 32 + ":999999999", "f" * 32 + ":-1", "http://evil.example", "bytes=0-1", "keep-alive"),
)
_NAMES: Final = (
    *("Idempotency-Key", "X-Request-Id", "Last-Event-ID", "X-Request-Timeout-Ms", "X-Session-ID"),
    *("X-Tokenyard-On-Disconnect", "X-Tokenyard-Event-Ids", "X-Vllm-Priority", "Accept", "Cookie"),
    *("Content-Type", "Content-Encoding", "Accept-Encoding", "Expect", "Upgrade", "Range", "TE"),
    *("Origin", "Sec-Fetch-Site", "X-Forwarded-For", "Forwarded", "traceparent", "If-None-Match"),
    *("Authorization", "x-api-key", "x-data-parallel-rank", "anthropic-version", "OpenAI-Beta"),
    *("X-" + "a" * 3000, "Host", "Via", "Trailer"),
    *("Date", "User-Agent", "Access-Control-Request-Method"),
)
_KINDS: Final = (
    *("", "text/plain", "application/json; charset=utf-16", "application/jsonl", "a/b/c", ";"),
    *("application/x-www-form-urlencoded", "multipart/form-data", "multipart/form-data; boundary="),
    *("application/json;;;", "APPLICATION/JSON", "application/json\t", "application/vnd.api+json"),
)
_PIECES: Final = (
    *("..", ".", "", "%00", "%2e%2e", "%2F", "%", "%zz", "%ff%fe", "%F0%9F%98%80", "a" * 3000, "*"),
    *("v1", "v2", "models", "responses", "files"),
    *("batches", "chat", "completions", "content", "cancel"),
    *("resp_" + "0" * 32, "file-" + "0" * 32, "batch_" + "0" * 32),
    *("speaker", "board", "input_items"),
    *("<script>", "'--", "${7*7}", "{{7*7}}", "a?b", "a#b"),
    *("a;b", "a%20b", "metrics", "health", "docs"),
)
_QUERIES: Final = (
    *("limit=-1", "limit=" + "9" * 5000, "limit=a", "order=up"),
    *("after=%00", "stream=true", "stream=2"),
    *("starting_after=-1", "starting_after=" + "9" * 20, "=", "&&&"),
    *("a" * 20_000, "%", "limit=1&limit=2"),
    *("after=file-" + "0" * 32, "purpose=" + "%00" * 500, "include[]=a"),
)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request, as bytes go to the gateway."""

    what: str
    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)

    def head(self, key: str) -> bytes:
        """All that comes before the body, with the client's key where it gives none."""
        given = {name.lower() for name, _ in self.headers}
        usual = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(self.body))}
        usual |= {"Authorization": f"Bearer {key}"}
        if "transfer-encoding" in given:
            del usual["Content-Length"]
        kept = [(name, value) for name, value in usual.items() if name.lower() not in given]
        lines = [f"{name}: {value}" for name, value in [*kept, *self.headers]]
        first = f"{self.method} {self.path} HTTP/1.1"
        return "\r\n".join([first, *lines, "", ""]).encode("latin-1", "replace")


@dataclass(slots=True)
class BadInput:
    """Draws requests by an OpenAPI document, and against it."""

    document: Mapping[str, Any]
    max_bytes: int
    random: random.Random = field(default_factory=random.Random)

    def draw(self, number: int) -> Sent:
        """The request of a number."""
        self.random = random.Random(number)
        ways = {self.described: 50, self.spoiled: 20, self.torn: 10, self.head: 10, self.large: 10}
        [way] = self.random.choices(list(ways), list(ways.values()))
        sent: Sent = way()
        return sent

    # By the document

    def described(self) -> Sent:
        """A request by the document, of which some values are wrong."""
        choose = self.random.choice
        path = choose([one for one in self.document["paths"] if one != "/metrics"])
        if self.random.random() < 0.75:  # most of what matters
            path = choose(list(CORES))
        method, operation = choose(list(self.document["paths"][path].items()))
        body, headers = b"", []
        given = operation.get("parameters", [])
        parameters = [one for one in given if one.get("required") or not self.random.randrange(4)]
        query = []
        for one in parameters:
            text = self._as_text(self.value(one["schema"]))
            if one["in"] == "path":
                path = path.replace(f"{{{one['name']}}}", quote(text) or "x")
            elif one["in"] == "query":
                query.append(f"{one['name']}={quote(text)}")
            else:
                headers.append((one["name"], quote(text, safe=" :;,=/")))
        content = operation.get("requestBody", {}).get("content", {})
        if "application/json" in content:
            value = self.value(content["application/json"]["schema"])
            body = as_json(self._acceptable(value, path))
            headers.append(("Content-Type", "application/json"))
        elif content:
            form = self.value(next(iter(content.values()))["schema"])
            body, kind = self.form(form if isinstance(form, dict) else {})
            headers.append(("Content-Type", kind))
        target = path + ("?" + "&".join(query) if query else "")
        return Sent("described", method.upper(), target, body, tuple(headers))

    def _acceptable(self, value: Any, path: str) -> Any:
        """A body of which most is right: of one with all fields, one is always wrong."""
        if not isinstance(value, dict) or path not in CORES or not self.random.randrange(10):
            return value
        names = self.random.sample(sorted(value), min(len(value), self.random.randrange(5)))
        body = {name: value[name] for name in names} | {"model": "speaker"}
        if self.random.randrange(5):
            body |= CORES[path]
        if path in GOOD and "stream" in GOOD[path] and self.random.randrange(2):
            body["stream"] = True
        return body

    def value(self, schema: Any, depth: int = 0) -> Any:
        """A value by a schema, now and then by none."""
        choose, draw = self.random.choice, self.random.random
        if not isinstance(schema, dict) or depth > 8 or draw() < 0.02:
            return copy.copy(choose(HOSTILE))
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return self.value(self.document["components"]["schemas"][name], depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return choose(schema["enum"])
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self.value(choose(schema[several]), depth + 1)
        kind = schema.get("type")
        if kind == "object" or "properties" in schema:
            return self._object(schema, depth)
        if kind == "array":
            count = self.random.choice([schema.get("minItems", 0), 1, 1, 2, 3])
            return [self.value(schema.get("items"), depth + 1) for _ in range(count)]
        low, high = schema.get("minimum", -1), schema.get("maximum", 9)
        plain: dict[Any, Callable[[], Any]] = {
            "string": lambda: choose(["", "a", "abc", self._text(), schema.get("default") or "x"]),
            "integer": lambda: choose([0, 1, 2, low, high, 2**31, -1]),
            "number": lambda: choose([0, 0.5, 1.0, low, high, 1e300, 1e-300]),
            "boolean": lambda: choose([True, False]),
            "null": lambda: None,
        }
        return plain.get(kind, lambda: copy.copy(choose(HOSTILE)))()

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        # Of the outermost, a body takes a few.
        share = 1.0 if not depth else 3 / max(3, len(properties))
        names = [
            one
            for one in properties
            if one in schema.get("required", ()) or self.random.random() < share
        ]
        made = {one: self.value(properties[one], depth + 1) for one in names}
        more = schema.get("additionalProperties")
        if more and not self.random.randrange(3):
            made[self._text()] = self.value(more, depth + 1)
        return made

    def _text(self) -> str:
        letters = string.ascii_letters + ' \n"\\{}[]<|>é€😀\u0301\u200d\x00'
        return "".join(self.random.choices(letters, k=self.random.choice([1, 5, 40, 300])))

    def _as_text(self, value: Any) -> str:
        text = value if isinstance(value, str) else as_json(value).decode()
        return text.encode(errors="replace")[:500].decode(errors="replace")

    def form(self, fields: Mapping[str, Any]) -> tuple[bytes, str]:
        """A form with a file, and its content type."""
        parts = []
        for name, value in ({"file": "{}\n", "purpose": "batch"} | dict(fields)).items():
            more = '; filename="a.jsonl"' if name == "file" else ""
            disposition = f'Content-Disposition: form-data; name="{quote(name)}"{more}'
            parts.append(f"--edge\r\n{disposition}\r\n\r\n{self._as_text(value)}\r\n")
        end = self.random.choice(["--edge--\r\n", "--edge--\r\n", "--edge", ""])
        body = ("".join(parts) + end).encode()
        return body, self.random.choice(["multipart/form-data; boundary=edge"] * 4 + list(_KINDS))

    # Against it

    def spoiled(self, path: str = "") -> Sent:
        """A good body of which one or two values, or their names, are hostile."""
        path = path or self.random.choice(list(GOOD))
        body = self._good(path)
        for _ in range(self.random.choice([1, 1, 2])):
            place = self.random.choice(places(body))
            value = copy.deepcopy(self.random.choice(HOSTILE))
            if isinstance(value, str) and len(place) == 1 and not self.random.randrange(9):
                body[value] = body.pop(place[0])
            else:
                put(body, place, value)
        return Sent("spoiled", "POST", path, as_json(body))

    def _good(self, path: str) -> dict[str, Any]:
        """A body that is mostly one that a simulated engine answers, too."""
        body = copy.deepcopy(GOOD[path])
        if self.random.randrange(4):
            for name in {"structured_outputs", "logprobs"} & body.keys():
                del body[name]
        return body

    def torn(self) -> Sent:
        """The bytes of a good body, changed."""
        path = self.random.choice(list(GOOD))
        raw = as_json(GOOD[path])
        at = self.random.randrange(len(raw))
        name = self.random.choice(list(GOOD[path]))
        ways: tuple[Callable[[], bytes], ...] = (
            lambda: raw[:at],
            lambda: raw[:at] + raw[at + 1 :],
            lambda: raw[:at] + bytes([self.random.randrange(256)]) + raw[at + 1 :],
            lambda: raw[:at] + self.random.randbytes(9) + raw[at:],
            lambda: raw[:-1] + b", " + as_json({name: GOOD[path][name]})[1:],  # twice
            lambda: raw[:-1] + b", " + as_json({name: self.random.choice(HOSTILE)})[1:],
            lambda: raw + raw,
            lambda: b"\xef\xbb\xbf" + raw,
            lambda: raw.decode().encode("utf-16"),
            lambda: self.random.randbytes(at),
            lambda: b"[" + raw + b"]",
            lambda: as_json(raw.decode()),
            lambda: raw.replace(b'"', b"'"),
            lambda: b"",
            lambda: b'{"a":' * self.random.choice([20, 127, 5000]),
        )
        return Sent("torn", "POST", path, self.random.choice(ways)())

    def head(self) -> Sent:
        """A good body with strange headers, another method or a strange URL."""
        path = self.random.choice(list(GOOD))
        sent = Sent("head", "POST", path, as_json(GOOD[path]))
        match self.random.randrange(5):
            case 0:
                return replace(sent, headers=(("Content-Type", self.random.choice(_KINDS)),))
            case 1:
                method = self.random.choice(["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"])
                return replace(sent, method=method, path=self._url())
            case 2:
                return replace(sent, path=f"{path}?{self.random.choice(_QUERIES)}")
        given = [
            (self.random.choice(_NAMES), self.random.choice(_VALUES))
            for _ in range(self.random.choice([1, 1, 2, 30]))
        ]
        return replace(sent, headers=(*sent.headers, *given))

    def _url(self) -> str:
        count = self.random.randrange(1, 6)
        url = "/" + "/".join(self.random.choice(_PIECES) for _ in range(count))
        return url + self.random.choice(["", "", f"?{self.random.choice(_QUERIES)}"])

    def large(self) -> Sent:
        """A good body with one value blown up, most to a size near a limit."""
        size = int(2 ** self.random.uniform(14, 21.9))
        path = self.random.choice(list(GOOD))
        body = self._good(path)
        if not self.random.randrange(5) and "metadata" in body:
            name = self.random.choice(list(GRAMMARS))
            self._constrain(body, path, name, min(size, 1_000_000))
        else:
            name, place = self.random.choice(list(BLOW_UPS)), self.random.choice(places(body))
            *way, last = place
            inner: Any = body
            for one in way:
                inner = inner[one]
            inner[last] = BLOW_UPS[name](inner[last], size)
            name += f" at {place}"
        raw = as_json(body, ensure_ascii=bool(self.random.randrange(2)))
        if len(raw) > self.max_bytes:
            raw = raw[: self.max_bytes]
        return Sent(f"large: {name}", "POST", path, raw)

    def _constrain(self, body: dict[str, Any], path: str, name: str, size: int) -> None:
        """A large constraint, in one of the forms that the endpoint has."""
        schema = self.random.choice(SCHEMAS)(size)
        tool = copy.deepcopy(LONG_TOOL)
        tool["function"]["parameters"] = schema
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        forms: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"tools": [tool], "tool_choice": "required"},
            "/v1/responses": {
                "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
            },
            "/v1/messages": {"tools": [{"name": "write", "input_schema": schema}]},
        }
        if self.random.randrange(2):
            body["structured_outputs"] = GRAMMARS[name](size)
            return
        body.pop("structured_outputs", None)
        body |= forms.get(path, {"response_format": form})


class _Raw(str):
    """A number as it is written."""

    __slots__ = ()


def as_json(value: Any, *, ensure_ascii: bool = True) -> bytes:
    """JSON as clients of any kind write it: NaN, halves of surrogate pairs, any numbers."""
    texts: list[str] = []

    def written(one: Any) -> Any:
        if isinstance(one, _Raw):
            texts.append(str(one))
            return f"@raw{len(texts) - 1}@"
        if isinstance(one, dict):
            return {name: written(inner) for name, inner in one.items()}
        return [written(inner) for inner in one] if isinstance(one, list) else one

    text = json.dumps(written(value), ensure_ascii=ensure_ascii)
    for number, raw in enumerate(texts):
        text = text.replace(f'"@raw{number}@"', raw)
    return text.encode(errors="surrogatepass")
