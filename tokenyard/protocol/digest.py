"""A digest of the fields that decide the answer, to compare two requests with one id.

The ledger keeps it as ``digest``. Clients compute it from the user's input, before text becomes
tokens, and pass it to `submit`; for a plain XADD the coordinator computes it from the entry. Both
are equal, so that a request may be submitted in one way and again in the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

import msgspec

from tokenyard.protocol import wire
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.parse import (
    BadJson,
    ForeignJson,
    parse_chat,
    parse_content,
    parse_params,
    parse_reasoning,
    read_media,
    read_task,
    read_text,
    unfold,
)

#: The digest of an entry that cannot be read.
UNREADABLE: Final = "unreadable"
_ERRORS: Final = (InvalidRequest, BadJson, msgspec.MsgspecError, UnicodeError, RecursionError)
_any = ForeignJson[Any]()

_BYTES: Final = 8
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_PROMPTS: Final = frozenset(name.encode() for name in wire.PROMPTS)
#: Longest fields whose parsed form is cached.
_LONGEST_KEPT: Final = 4096

_KINDS: Final[Mapping[str, bytes]] = {name: f"\0{name}\0".encode() for name in wire.PROMPTS}

_sorted = msgspec.json.Encoder(order="sorted").encode


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, as of chat messages or several inputs."""
    return _sorted(msgspec.to_builtins(value, str_keys=True))


class Recipe:
    """The digest of requests with the same model and parameters, without their prompts."""

    __slots__ = ("_prefix", "stated")

    def __init__(
        self,
        model: str,
        params: wire.SamplingParams | wire.PoolingParams,
        stated: Iterable[str],
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] = _NOTHING,
        *,
        task: wire.Task = wire.GENERATE,
        query: str = "",
        media: Mapping[str, Sequence[str]] = _NOTHING,
    ) -> None:
        self.stated = sorted(stated)  # parameters given with the wire's default
        decisive: list[Any] = [model, params, self.stated]
        if reasoning_ended is not None or reasoning_parser_kwargs:
            decisive += [reasoning_ended, dict(reasoning_parser_kwargs)]
        if task != wire.GENERATE:
            decisive += [task, query]
        if media:
            decisive.append(dict(media))
        self._prefix = blake2b(canonical_json(decisive), digest_size=_BYTES)

    def digest(self, kind: str, content: bytes, chat: wire.ChatOptions = wire.PLAIN_CHAT) -> str:
        """The digest with a prompt, given as the name of its field and its canonical value."""
        whole = self._prefix.copy()
        whole.update(_KINDS[kind])
        whole.update(content)
        if chat is not wire.PLAIN_CHAT and chat != wire.PLAIN_CHAT:
            whole.update(b"\0" + canonical_json(chat))
        return whole.hexdigest()

    def digest_of(self, request: wire.Request) -> str:
        """The digest of a request with this model and these parameters."""
        if request.tokens is not None:
            return self.digest("tokens", request.tokens)
        if request.prompt is not None:
            return self.digest("prompt", request.prompt.encode())
        if request.inputs is not None:
            return self.digest("inputs", canonical_json(request.inputs))
        return self.digest("messages", canonical_json(request.messages), request.chat)


def request_digest(request: wire.Request) -> str:
    """The digest of a request with the user's own prompt."""
    recipe = Recipe(
        request.model,
        request.pooling if request.pools else request.params,
        request.stated,
        request.reasoning_ended,
        request.reasoning_parser_kwargs,
        task=request.task,
        query=request.query,
        media=request.media,
    )
    return recipe.digest_of(request)


def entry_digest(fields: Mapping[bytes, bytes]) -> str:
    """The digest of an untrusted intake entry; never raises."""
    try:
        kind, content = parse_content(fields if _PROMPTS & fields.keys() else unfold(fields))
        chat = wire.PLAIN_CHAT
        if kind in ("messages", "inputs"):
            content = canonical_json(_any.decode(content))
        if kind == "messages":
            chat = parse_chat(unfold(fields), kind)
        recipe = entry_recipe(fields)
        return UNREADABLE if recipe is NO_RECIPE else recipe.digest(kind, content, chat)
    except _ERRORS:
        return UNREADABLE


def entry_recipe(fields: Mapping[bytes, bytes]) -> Recipe:
    """The recipe of an entry; `NO_RECIPE` where that cannot be read.

    What is nested as deeply as the parser of requests can just read may be too deep here.
    """
    own = tuple(fields.get(name, b"") for name in _DECISIVE)
    try:
        return (_read if sum(map(len, own)) > _LONGEST_KEPT else _read_once)(*own)
    except _ERRORS:
        return NO_RECIPE


#: The fields beside the prompt that decide the answer, and those in common.
_DECISIVE: Final = (
    *(b"common", b"model", b"params", b"task", b"query"),
    *(b"reasoning_ended", b"reasoning_parser_kwargs", b"media"),
)


def _read(*own: bytes) -> Recipe:
    given = {name: value for name, value in zip(_DECISIVE, own, strict=True) if value}
    fields = unfold(given)
    read, named = parse_params(fields)
    stated = defaults_among(read, named) if isinstance(read, wire.SamplingParams) else ()
    return Recipe(
        fields.get(b"model", b"").decode(),
        read,
        stated,
        *parse_reasoning(fields),
        task=read_task(fields),
        query=read_text(fields, "query"),
        media=read_media(fields),
    )


#: No model has this name, so no request has such a digest.
NO_RECIPE: Final = Recipe("\0", wire.SamplingParams(), ())
_read_once = functools.lru_cache(maxsize=256)(_read)


def defaults_among(params: wire.SamplingParams, given: Iterable[str]) -> tuple[str, ...]:
    """Parameters that were given with the wire's default, which is omitted otherwise."""
    return tuple(name for name in given if getattr(params, name) == getattr(_SILENT, name))


#: The default parameters.
_SILENT: Final = wire.SamplingParams()
