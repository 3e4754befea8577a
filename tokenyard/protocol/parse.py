"""Parses untrusted entries: their JSON, their fields, requests, assignments.

`parse_request`, `parse_owner` and `parse_assignment` never raise (guarantee G7); what reads one
field raises `InvalidRequest` with the field's name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from tokenyard.protocol import wire
from tokenyard.protocol.chat import check_chat, check_messages
from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.keys import NAME_RULE, is_name
from tokenyard.protocol.media import MODALITIES, NAME
from tokenyard.protocol.sampling import why_unknown
from tokenyard.protocol.streams import digits
from tokenyard.protocol.texts import did_you_mean

T = TypeVar("T")
Default = TypeVar("Default", int, None)


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
_CHAT_FIELDS: Final = frozenset(name.encode() for name in wire.ChatOptions.__struct_fields__)
_params_decoder = ForeignJson[wire.SamplingParams](wire.SamplingParams)
_pooling_decoder = ForeignJson[wire.PoolingParams](wire.PoolingParams)
_media_decoder = ForeignJson[dict[str, list[str]]](dict[str, list[str]])
_MODALITIES: Final = frozenset(MODALITIES.values())
_inputs_decoder = ForeignJson[list[wire.Input]](list[wire.Input])
_objects_decoder = ForeignJson[list[dict[str, Any]]](list[dict[str, Any]])
object_decoder = ForeignJson[dict[str, Any]](dict[str, Any])
#: Texts of a pair.
_PAIR: Final = 2
_members_decoder = ForeignJson[dict[str, msgspec.Raw]](dict[str, msgspec.Raw])
_ids_decoder = ForeignJson[list[int]](list[Annotated[int, Meta(ge=0, le=wire.MAX_TOKEN_ID)]])


def read_text(fields: Mapping[bytes, bytes], name: str) -> str:
    """The text of a field; "" where it is missing."""
    try:
        return fields.get(name.encode(), b"").decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"is not UTF-8 at byte {error.start}") from None


def read_integer(
    fields: Mapping[bytes, bytes], name: str, default: Default, low: int, high: int
) -> int | Default:
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
            why = why_no_pooling_param if decoder is _pooling_decoder else why_unknown
            raise InvalidRequest(f"params.{unknown[1]}", why(unknown[1])) from None
        raise InvalidRequest(name + (path[1] if path else ""), message) from None


def read_params(fields: Mapping[bytes, bytes], defaults: Mapping[str, Any]) -> wire.SamplingParams:
    """The sampling parameters; ``defaults`` are for those that are not set."""
    if defaults:
        given = read_json(fields, "params", _members_decoder, {})
        fields = {b"params": msgspec.json.encode({**defaults, **given})}
    params: wire.SamplingParams = read_json(
        fields, "params", _params_decoder, wire.SamplingParams()
    )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("params.min_tokens", "must not exceed max_tokens")
    return params


def read_task(fields: Mapping[bytes, bytes]) -> wire.Task:
    """What the model shall do."""
    name = read_text(fields, "task") or wire.GENERATE
    for task in wire.TASKS:
        if name == task:
            return task
    raise InvalidRequest(
        "task", f"use one of {', '.join(wire.TASKS)}{did_you_mean(name, wire.TASKS)}"
    )


def read_pooling(fields: Mapping[bytes, bytes]) -> wire.PoolingParams:
    """The parameters of a task that pools."""
    params: wire.PoolingParams = read_json(fields, "params", _pooling_decoder, wire.PoolingParams())
    return params


def why_no_pooling_param(name: str) -> str:
    """The error message for a name that a task which pools does not take."""
    known = wire.PoolingParams.__struct_fields__
    if name in wire.SamplingParams.__struct_fields__:
        return "is for the task generate: leave it out"
    return f"there is no such parameter{did_you_mean(name, known)}"


def parse_params(
    fields: Mapping[bytes, bytes],
) -> tuple[wire.SamplingParams | wire.PoolingParams, list[str]]:
    """The parameters of an entry, and the names of those sampling parameters that it sets.

    Raises `InvalidRequest`.
    """
    if read_task(fields) != wire.GENERATE:
        return read_pooling(fields), []
    return read_params(fields, NO_DEFAULTS), list(read_json(fields, "params", _members_decoder, {}))


def parse_reasoning(fields: Mapping[bytes, bytes]) -> tuple[bool | None, dict[str, Any]]:
    """Whether the prompt ends the reasoning, and the arguments of the model's reasoning parser.

    Raises `InvalidRequest`.
    """
    name = "reasoning_parser_kwargs"
    if b"reasoning_ended" not in fields and name.encode() not in fields:
        return None, {}
    ended = read_flag(fields, "reasoning_ended") if b"reasoning_ended" in fields else None
    return ended, read_json(fields, name, object_decoder, {})


def parse_content(fields: Mapping[bytes, bytes]) -> tuple[str, bytes]:
    """The field that holds the prompt of an entry, and its value, tokens packed.

    Raises `InvalidRequest`.
    """
    for name in wire.PROMPTS:
        value = fields.get(name.encode())
        if value is not None:
            return name, read_tokens(fields) if name == "tokens" else value
    raise InvalidRequest("prompt", "is missing")


def parse_messages(raw: bytes) -> list[dict[str, Any]]:
    """Read the JSON of chat messages; raises `InvalidRequest`."""
    messages: list[dict[str, Any]] = read_json({b"messages": raw}, "messages", _objects_decoder, [])
    check_messages(messages)
    return messages


def read_chat_options(given: Mapping[str, Any]) -> wire.ChatOptions:
    """Options of a chat, as a program writes them; raises `InvalidRequest`.

    Their values are checked when the request is parsed.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(given, str_keys=True), wire.ChatOptions)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        raise InvalidRequest(path.strip("`").removeprefix("$."), message) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(min(given), f"cannot be written as JSON: {error}") from None


def parse_chat(fields: Mapping[bytes, bytes], prompt: str) -> wire.ChatOptions:
    """The options for a chat template; raises `InvalidRequest`.

    ``prompt`` is the name of the field with the prompt. `check_chat` checks their values.
    """
    if _CHAT_FIELDS.isdisjoint(fields):
        return wire.PLAIN_CHAT
    for name in sorted(_CHAT_FIELDS):
        if prompt != "messages" and name in fields:
            raise InvalidRequest(name.decode(), f"goes with messages, not with {prompt}")
    chat = wire.ChatOptions(
        tools=read_json(fields, "tools", _objects_decoder, None),
        documents=read_json(fields, "documents", _objects_decoder, None),
        chat_template_kwargs=read_json(fields, "chat_template_kwargs", object_decoder, {}),
        add_generation_prompt=read_flag(fields, "add_generation_prompt", default=True),
        continue_final_message=read_flag(fields, "continue_final_message"),
    )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("continue_final_message", "needs add_generation_prompt to be false")
    return chat


def read_prompt(fields: Mapping[bytes, bytes]) -> str:
    """A prompt of text."""
    prompt = read_text(fields, "prompt")
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    return prompt


def read_media(fields: Mapping[bytes, bytes], prompt: str = "tokens") -> dict[str, list[str]]:
    """The media that go with tokens."""
    media: dict[str, list[str]] = read_json(fields, "media", _media_decoder, {})
    if media and prompt != "tokens":
        raise InvalidRequest("media", f"goes with tokens, not with {prompt}")
    for modality, names in media.items():
        if modality not in _MODALITIES or not all(map(NAME.fullmatch, names)):
            raise InvalidRequest("media", "give names like media:<SHA-256> by modality")
    return media


def read_inputs(fields: Mapping[bytes, bytes]) -> list[wire.Input]:
    """Several inputs."""
    inputs: list[wire.Input] = read_json(fields, "inputs", _inputs_decoder, [])
    if not 0 < len(inputs) <= wire.MAX_INPUTS:
        raise InvalidRequest("inputs", f"give 1 to {wire.MAX_INPUTS}, not {len(inputs)}")
    for at, one in enumerate(inputs):
        halves = [half for half in one if isinstance(half, list)] if isinstance(one, list) else []
        if not one or [] in halves:
            raise InvalidRequest(f"inputs[{at}]", "is empty")
        if halves and not len(halves) == len(one) == _PAIR:
            raise InvalidRequest(
                f"inputs[{at}]", "give a text, token ids, or two arrays of token ids"
            )
    return inputs


def read_tokens(fields: Mapping[bytes, bytes]) -> bytes:
    """The prompt's packed ids; they come packed, or as a JSON array.

    They cannot be confused: ``]`` as the last byte of packed ids, the top byte of an int32,
    would mean an id above 1.5 billion.
    """
    raw = fields[b"tokens"]
    if raw[:1] == b"[" and raw[-1:] == b"]":
        packed = wire.pack_tokens(read_json(fields, "tokens", _ids_decoder, []))
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


#: A server id, "<intake>/<intake entry>".
_SID = re.compile(rb"[a-z]{1,10}(:[A-Za-z0-9_.:@-]{1,90})?/[0-9]{1,20}-[0-9]{1,20}")
_EPOCH = re.compile(rb"[0-9]{1,19}")
#: Fields that are ignored in ``common``.
_NOT_COMMON: Final = wire.SYSTEM_FIELDS | {b"common"}
#: Longest field ``common`` whose parsed form is cached.
_LONGEST_TEMPLATE: Final = 4096
#: An entry with only these fields can be parsed by its template.
_TEMPLATE_FIELDS: Final = wire.SYSTEM_FIELDS | {b"id", b"tokens", b"prompt", b"common"}
_texts_decoder = ForeignJson[dict[str, str]](dict[str, str])


#: A stream of replies that its reader has named so that nobody can guess it.
_SECRET_STREAM: Final = re.compile(r"replies:[A-Za-z0-9_.:@-]{1,67}\.[0-9a-f]{32}")


def parse_name(raw: bytes) -> str | None:
    """The name of a client; None where it is invalid."""
    text = raw.decode(errors="replace")
    return text if is_name(text) else None


def parse_id(raw: bytes) -> str | None:
    """The id of a request; None where it is invalid."""
    try:
        return raw.decode() if 0 < len(raw) <= wire.MAX_ID_BYTES else None
    except UnicodeDecodeError:
        return None


def parse_request(
    fields: Mapping[bytes, bytes], defaults: Mapping[str, Any] = NO_DEFAULTS
) -> wire.Request | wire.Refused | wire.Unanswerable:
    """Parse an untrusted entry; never raises.

    An entry with a valid id and client is a `Request`, or `Refused` with the reason; any other is
    `Unanswerable`. ``defaults`` are sampling parameters, as in JSON, for those that the request
    does not set.
    """
    if b"common" in fields:
        request = None if defaults else _from_template(fields)
        if request is not None:
            return request
        try:
            fields = unfold(fields)
        except InvalidRequest as error:
            # It may name the client, unless the entry has a field ``client`` of its own.
            if b"client" not in fields:
                return wire.Unanswerable(str(error))
            return _parse_request(fields, defaults, error)
    return _parse_request(fields, defaults)


def parse_owner(fields: Mapping[bytes, bytes]) -> tuple[str, str] | None:
    """Client and id of an untrusted entry as `parse_request` finds them, without its other fields.

    None where it is `Unanswerable`; never raises.
    """
    try:
        fields = unfold(fields)
    except InvalidRequest:
        if b"client" not in fields:
            return None  # ``common`` may name it
    try:
        request_id, client = _parse_address(fields)
    except InvalidRequest:
        return None
    return client, request_id


def read_request(
    fields: Mapping[bytes, bytes], defaults: Mapping[str, Any] = NO_DEFAULTS
) -> wire.Request:
    """`parse_request` for requests of our own; raises `InvalidRequest` where one is refused."""
    read = parse_request(fields, defaults)
    if isinstance(read, wire.Request):
        return read
    reason = read.reason if isinstance(read, wire.Unanswerable) else read.message
    field, _, message = reason.partition(": ")
    raise InvalidRequest(field, message)


def unfold(fields: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The fields of an entry together with those in its field ``common``; its own take precedence.

    Raises `InvalidRequest` where that field cannot be read. Fields that only the system writes, and
    another ``common``, are ignored there.
    """
    if b"common" not in fields:
        return fields
    texts: dict[str, str] = read_json(fields, "common", _texts_decoder, {})
    common = {name.encode(): text.encode() for name, text in texts.items()}
    for name in _NOT_COMMON & common.keys():
        del common[name]
    own = {name: value for name, value in fields.items() if name != b"common"}
    return {**common, **own}


def _from_template(fields: Mapping[bytes, bytes]) -> wire.Request | None:
    """A request of token ids or text, by its template; None where it needs the full parser.

    Nearly all requests of one client differ only in id and prompt, so the rest is parsed once.
    """
    common, raw_id = fields[b"common"], fields.get(b"id", b"")
    packed, text = fields.get(b"tokens"), fields.get(b"prompt")
    if len(common) > _LONGEST_TEMPLATE or not _TEMPLATE_FIELDS.issuperset(fields):
        return None
    template = _template(common)
    if (
        template is None
        or not 0 < len(raw_id) <= wire.MAX_ID_BYTES
        or (packed is None) == (text is None)
    ):
        return None
    try:
        if text:
            return msgspec.structs.replace(template, id=raw_id.decode(), prompt=text.decode())
        if packed and packed[:1] != b"[" and len(packed) % 4 == 0 and packed[3::4].isascii():
            return msgspec.structs.replace(template, id=raw_id.decode(), tokens=packed, prompt=None)
    except UnicodeDecodeError:
        pass
    return None


@functools.lru_cache(maxsize=256)
def _template(common: bytes) -> wire.Request | None:
    """The request without its id and prompt; None where it is not valid."""
    try:
        fields = unfold({b"common": common})
    except InvalidRequest:
        return None
    if any(name.encode() in fields for name in wire.OWN_FIELDS):
        return None
    request = _parse_request({**fields, b"id": b"?", b"prompt": b"?"}, NO_DEFAULTS)
    return request if isinstance(request, wire.Request) else None


def _parse_request(
    fields: Mapping[bytes, bytes], defaults: Mapping[str, Any], unread: InvalidRequest | None = None
) -> wire.Request | wire.Refused | wire.Unanswerable:
    """``unread`` is what is wrong with the field ``common``, for which it is refused."""
    try:
        request_id, client = _parse_address(fields)
    except InvalidRequest as error:
        return wire.Unanswerable(str(error))
    reply_to = ""
    try:
        reply_to = _parse_reply_to(fields, client)
        if unread is not None:
            raise unread
        return _parse_body(fields, request_id, client, reply_to, defaults)
    except InvalidRequest as error:
        return wire.Refused(
            request_id, client, reply_to, Code.INVALID_REQUEST, str(unread or error)
        )


def _parse_address(fields: Mapping[bytes, bytes]) -> tuple[str, str]:
    raw = fields.get(b"id", b"")
    if not 0 < len(raw) <= wire.MAX_ID_BYTES:
        raise InvalidRequest("id", f"give 1 to {wire.MAX_ID_BYTES} bytes, not {len(raw)}")
    client = read_text(fields, "client") if b"client" in fields else wire.DEFAULT_CLIENT
    if not is_name(client):
        raise InvalidRequest("client", NAME_RULE)
    return read_text(fields, "id"), client


def _parse_reply_to(fields: Mapping[bytes, bytes], client: str) -> str:
    reply_to = read_text(fields, "reply_to")
    if reply_to not in ("", f"replies:{client}") and not _SECRET_STREAM.fullmatch(reply_to):
        message = f"leave it out or give replies:{client}, or replies:<name>.<32 hex digits>"
        raise InvalidRequest("reply_to", message)
    return reply_to


def _parse_body(
    fields: Mapping[bytes, bytes],
    request_id: str,
    client: str,
    reply_to: str,
    defaults: Mapping[str, Any],
) -> wire.Request:
    if len(fields) > wire.MAX_FIELDS and len(fields.keys() - wire.SYSTEM_FIELDS) > wire.MAX_FIELDS:
        raise InvalidRequest("entry", f"has more than {wire.MAX_FIELDS} fields")
    version = read_integer(fields, "v", wire.WIRE_VERSION, 1, 2**31)
    if version != wire.WIRE_VERSION:
        raise InvalidRequest("v", f"this yard speaks version {wire.WIRE_VERSION}, not {version}")
    given = [name for name in wire.PROMPTS if name.encode() in fields]
    if len(given) != 1:
        raise InvalidRequest(
            "prompt", f"give exactly one of {', '.join(wire.PROMPTS)}, not {given or 'none'}"
        )
    task = read_task(fields)
    reasoning_ended, reasoning_parser_kwargs = parse_reasoning(fields)
    request = wire.Request(
        id=request_id,
        client=client,
        tokens=read_tokens(fields) if given == ["tokens"] else None,
        prompt=read_prompt(fields) if given == ["prompt"] else None,
        messages=read_json(fields, "messages", _objects_decoder, None),
        inputs=read_inputs(fields) if given == ["inputs"] else None,
        model=read_text(fields, "model"),
        params=read_params(fields, defaults) if task == wire.GENERATE else wire.SamplingParams(),
        task=task,
        pooling=read_pooling(fields) if task != wire.GENERATE else wire.PoolingParams(),
        query=read_text(fields, "query"),
        stream=read_flag(fields, "stream"),
        stream_interval_ms=read_integer(
            fields, "stream_interval_ms", None, 0, wire.MAX_STREAM_INTERVAL_MS
        ),
        reply_to=reply_to,
        priority=read_integer(fields, "priority", 0, -(2**31), 2**31 - 1),
        deadline_ms=read_integer(fields, "deadline", 0, 0, 2**53) or None,
        result_ttl_s=read_integer(
            fields, "result_ttl", wire.DEFAULT_RESULT_TTL_S, 1, wire.MAX_RESULT_TTL_S
        ),
        tenant=read_text(fields, "tenant"),
        session=read_text(fields, "session"),
        metadata=read_json(fields, "metadata", object_decoder, {}),
        chat=parse_chat(fields, given[0]),
        cache_salt=read_text(fields, "cache_salt"),
        reasoning_ended=reasoning_ended,
        reasoning_parser_kwargs=reasoning_parser_kwargs,
        media=read_media(fields, given[0]),
    )
    check_chat(request)
    check_task(request)
    return request


def check_task(request: wire.Request) -> None:
    """Raises `InvalidRequest` for fields that do not go with the task of a request."""
    task = request.task
    if not request.pools and request.inputs is not None:
        names = ", ".join(one for one in wire.TASKS if one != wire.GENERATE)
        raise InvalidRequest("inputs", f"go with one of the tasks {names}; to generate, give one")
    if request.pools and request.stream:
        raise InvalidRequest("stream", f"the task {task} has no tokens to stream; leave it out")
    if task == "score" and not request.query:
        raise InvalidRequest("query", "is missing: the task score compares the prompt with it")
    if task != "score" and request.query:
        raise InvalidRequest("query", f"goes with the task score, not with {task}")
    if task == "score" and (request.tokens is not None or request.messages is not None):
        raise InvalidRequest("prompt", "give text: the task score joins it with the query")
    for at, one in enumerate(request.inputs or ()):
        if task == "score" and not isinstance(one, str):
            raise InvalidRequest(f"inputs[{at}]", "give text: the task score joins it to the query")


def parse_assignment(
    entry: str, fields: Mapping[bytes, bytes], defaults: Mapping[str, Any] = NO_DEFAULTS
) -> wire.Assignment | None:
    """Parse a lane entry; None where it is not an assignment.

    A request that the coordinator accepted and this version cannot read has `Assignment.fault`.
    ``defaults`` are the model's sampling parameters, as in `parse_request`.
    """
    request = parse_request(fields, defaults)
    sid, published = fields.get(b"sid", b""), fields.get(b"published", b"")
    attempt = _count(fields.get(b"attempt", b""))
    crashes, faults = _count(fields.get(b"crashes")), _count(fields.get(b"faults"))
    epoch = fields.get(b"epoch")
    if attempt is None or crashes is None or faults is None:
        return None
    if not _SID.fullmatch(sid) or len(published) % 4:
        return None
    error = ""
    if not isinstance(request, wire.Request):
        if isinstance(request, wire.Unanswerable):
            return None
        error = request.message
        request = wire.Request(id=request.id, client=request.client, reply_to=request.reply_to)
    return wire.Assignment(
        request=request,
        entry=entry,
        sid=sid.decode(),
        attempt=attempt,
        crashes=crashes,
        published=published,
        faults=faults,
        fault=error,
        first_epoch=int(epoch) if epoch and _EPOCH.fullmatch(epoch) else None,
        choices=fields.get(b"choices", b""),
        is_charged=b"charged" in fields,
    )


def _count(text: bytes | None) -> int | None:
    """A count, 0 where the field is missing; None where it is invalid."""
    return 0 if text is None else digits(text)
