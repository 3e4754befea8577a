"""Reads JSON and fields of untrusted entries; each error names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from tokenyard.protocol.chat import check_messages, check_objects, check_template_kwargs
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.sampling import why_unknown
from tokenyard.protocol.wire import (
    MAX_TOKEN_ID,
    PLAIN_CHAT,
    ChatOptions,
    SamplingParams,
    pack_tokens,
)

# JSON that somebody else wrote: whatever is wrong with it is one error.

T = TypeVar("T")


class BadJson(ValueError):
    """Bytes are not the JSON expected; the message says how, and the cause is msgspec's error."""


class ForeignJson(Generic[T]):
    """Decodes JSON of one type. Thousands of nested arrays are no more than bad JSON."""

    def __init__(self, kind: Any = Any) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def decode(self, raw: bytes | str) -> T:
        """The value; raises `BadJson`."""
        try:
            value: T = self._decode(raw)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise BadJson(str(error)) from error
        return value


#: No sampling parameters of a model.
NO_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({})
#: The path in a message of msgspec.
_PATH = re.compile(r"`\$([^`]*)`")
#: msgspec's message for an unknown name.
UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`")

#: Fields for chats only.
_CHAT_FIELDS: Final = frozenset(name.encode() for name in ChatOptions.__struct_fields__)

_params_decoder = ForeignJson[SamplingParams](SamplingParams)
_objects_decoder = ForeignJson[list[dict[str, Any]]](list[dict[str, Any]])
object_decoder = ForeignJson[dict[str, Any]](dict[str, Any])
_members_decoder = ForeignJson[dict[str, msgspec.Raw]](dict[str, msgspec.Raw])
_ids_decoder = ForeignJson[list[int]](list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]])


def read_text(fields: Mapping[bytes, bytes], name: str) -> str:
    """The text of a field; "" where it is missing."""
    try:
        return fields.get(name.encode(), b"").decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"is not UTF-8 at byte {error.start}") from None


def read_integer(
    fields: Mapping[bytes, bytes], name: str, default: int, low: int, high: int
) -> int:
    """A whole number from ``low`` to ``high``."""
    raw = fields.get(name.encode())
    if raw is None:
        return default
    try:
        value = int(raw)
    except ValueError:
        raise InvalidRequest(name, "is not a whole number") from None
    if not low <= value <= high:
        raise InvalidRequest(name, f"must be from {low} to {high}")
    return value


def read_flag(fields: Mapping[bytes, bytes], name: str, *, default: bool = False) -> bool:
    """A field that is 0 or 1."""
    raw = fields.get(name.encode(), b"%d" % default)
    if raw not in (b"0", b"1"):
        raise InvalidRequest(name, "must be 0 or 1")
    return raw == b"1"


def read_json(
    fields: Mapping[bytes, bytes], name: str, decoder: ForeignJson[Any], default: Any
) -> Any:
    """The JSON of a field."""
    raw = fields.get(name.encode())
    if raw is None:
        return default
    try:
        return decoder.decode(raw)
    except BadJson as error:
        if not isinstance(error.__cause__, msgspec.ValidationError):
            raise InvalidRequest(name, f"is not the JSON expected: {error}") from None
        message, _, place = str(error).partition(" - at ")
        path = _PATH.search(place)
        unknown = UNKNOWN_FIELD.fullmatch(message)
        if unknown and name == "params" and not path:
            raise InvalidRequest(f"params.{unknown[1]}", why_unknown(unknown[1])) from None
        raise InvalidRequest(name + (path[1] if path else ""), message) from None


def read_params(fields: Mapping[bytes, bytes], defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters; ``defaults`` are for those that are not set."""
    if defaults:
        given = read_json(fields, "params", _members_decoder, {})
        fields = {b"params": msgspec.json.encode({**defaults, **given})}
    params: SamplingParams = read_json(fields, "params", _params_decoder, SamplingParams())
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("params.min_tokens", "must not exceed max_tokens")
    return params


def parse_params(fields: Mapping[bytes, bytes]) -> tuple[SamplingParams, list[str]]:
    """The sampling parameters of an entry, and the names of those that it sets.

    Raises `InvalidRequest`.
    """
    return read_params(fields, NO_DEFAULTS), list(read_json(fields, "params", _members_decoder, {}))


def parse_reasoning(fields: Mapping[bytes, bytes]) -> tuple[bool | None, dict[str, Any]]:
    """Whether the prompt ends the reasoning, and the arguments of the model's reasoning parser.

    Raises `InvalidRequest`.
    """
    name = "reasoning_parser_kwargs"
    if b"reasoning_ended" not in fields and name.encode() not in fields:
        return None, {}
    ended = read_flag(fields, "reasoning_ended") if b"reasoning_ended" in fields else None
    kwargs: dict[str, Any] = read_json(fields, name, object_decoder, {})
    check_objects(name, [kwargs])
    return ended, kwargs


def parse_content(fields: Mapping[bytes, bytes]) -> tuple[str, bytes]:
    """The field that holds the prompt of an entry, and its value, tokens packed.

    Raises `InvalidRequest`.
    """
    for name in ("tokens", "prompt", "messages"):
        value = fields.get(name.encode())
        if value is not None:
            return name, read_tokens(fields) if name == "tokens" else value
    raise InvalidRequest("prompt", "is missing")


def parse_messages(raw: bytes) -> list[dict[str, Any]]:
    """Read the JSON of chat messages; raises `InvalidRequest`."""
    messages: list[dict[str, Any]] = read_json({b"messages": raw}, "messages", _objects_decoder, [])
    check_messages(messages)
    return messages


def read_chat_options(given: Mapping[str, Any]) -> ChatOptions:
    """Options of a chat, as a program writes them; raises `InvalidRequest`.

    Their values are checked when the request is parsed.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(given, str_keys=True), ChatOptions)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        raise InvalidRequest(path.strip("`").removeprefix("$."), message) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(min(given), f"cannot be written as JSON: {error}") from None


def parse_chat(fields: Mapping[bytes, bytes], prompt: str) -> ChatOptions:
    """The options for a chat template; raises `InvalidRequest`.

    ``prompt`` is the name of the field with the prompt.
    """
    if _CHAT_FIELDS.isdisjoint(fields):
        return PLAIN_CHAT
    if prompt != "messages":
        [name, *_] = sorted(name.decode() for name in _CHAT_FIELDS & fields.keys())
        raise InvalidRequest(name, f"goes with messages, not with {prompt}")
    chat = ChatOptions(
        tools=_objects(fields, "tools"),
        documents=_objects(fields, "documents"),
        chat_template_kwargs=read_json(fields, "chat_template_kwargs", object_decoder, {}),
        add_generation_prompt=read_flag(fields, "add_generation_prompt", default=True),
        continue_final_message=read_flag(fields, "continue_final_message"),
    )
    check_template_kwargs(chat.chat_template_kwargs)
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("continue_final_message", "needs add_generation_prompt to be false")
    return chat


def _objects(fields: Mapping[bytes, bytes], name: str) -> list[dict[str, Any]] | None:
    objects: list[dict[str, Any]] | None = read_json(fields, name, _objects_decoder, None)
    if objects is not None:
        check_objects(name, objects)
    return objects


def read_prompt(fields: Mapping[bytes, bytes]) -> str:
    """A prompt of text."""
    prompt = read_text(fields, "prompt")
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    return prompt


def read_tokens(fields: Mapping[bytes, bytes]) -> bytes:
    """The prompt's packed ids; they come packed, or as a JSON array.

    They cannot be confused: ``]`` as the last byte of packed ids, the top byte of an int32,
    would mean an id above 1.5 billion.
    """
    raw = fields[b"tokens"]
    if raw[:1] == b"[" and raw[-1:] == b"]":
        packed = pack_tokens(read_json(fields, "tokens", _ids_decoder, []))
    else:
        packed = raw
    if not packed:
        raise InvalidRequest("tokens", "is empty")
    if len(packed) % 4:
        raise InvalidRequest("tokens", "packed ids are int32: the length must divide by four")
    return check_ids(packed)


def check_ids(packed: bytes) -> bytes:
    """Packed token ids, none of which is negative."""
    # The top byte of a negative id is 0x80 or more; `isascii` is the fastest check for that.
    if not packed[3::4].isascii():
        raise InvalidRequest("tokens", "token ids must not be negative")
    return packed
