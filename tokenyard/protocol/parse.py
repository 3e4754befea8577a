"""Parsing untrusted entries; never raises (guarantee G7)."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.fields import (
    NO_DEFAULTS,
    ForeignJson,
    object_decoder,
    parse_chat,
    parse_messages,
    parse_reasoning,
    read_flag,
    read_integer,
    read_json,
    read_params,
    read_prompt,
    read_text,
    read_tokens,
)
from tokenyard.protocol.keys import NAME_RULE, is_name
from tokenyard.protocol.wire import (
    DEFAULT_CLIENT,
    DEFAULT_RESULT_TTL_S,
    MAX_FIELDS,
    MAX_ID_BYTES,
    MAX_RESULT_TTL_S,
    OWN_FIELDS,
    SYSTEM_FIELDS,
    WIRE_VERSION,
    Assignment,
    Refused,
    Request,
    Unanswerable,
)

#: A server id, "<intake>/<intake entry>".
_SID = re.compile(rb"[a-z]{1,10}(:[A-Za-z0-9_.:@-]{1,90})?/[0-9]{1,20}-[0-9]{1,20}")
_LONGEST_COUNT: Final = 10  # digits
_EPOCH = re.compile(rb"[0-9]{1,19}")
#: Fields that are ignored in ``common``.
_NOT_COMMON: Final = SYSTEM_FIELDS | {b"common"}
#: Longest field ``common`` whose parsed form is cached.
_LONGEST_TEMPLATE: Final = 4096
#: An entry with only these fields can be parsed by its template.
_TEMPLATE_FIELDS: Final = SYSTEM_FIELDS | {b"id", b"tokens", b"prompt", b"common"}


_texts_decoder = ForeignJson[dict[str, str]](dict[str, str])


def parse_name(raw: bytes) -> str | None:
    """The name of a client; None where it is invalid."""
    text = raw.decode(errors="replace")
    return text if is_name(text) else None


def parse_id(raw: bytes) -> str | None:
    """The id of a request; None where it is invalid."""
    try:
        return raw.decode() if 0 < len(raw) <= MAX_ID_BYTES else None
    except UnicodeDecodeError:
        return None


def parse_request(
    fields: Mapping[bytes, bytes], defaults: Mapping[str, Any] = NO_DEFAULTS
) -> Request | Refused | Unanswerable:
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
            return _refuse_unread(fields, str(error))
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
) -> Request:
    """`parse_request` for requests of our own; raises `InvalidRequest` where one is refused."""
    read = parse_request(fields, defaults)
    if isinstance(read, Request):
        return read
    reason = read.reason if isinstance(read, Unanswerable) else read.message
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


def _from_template(fields: Mapping[bytes, bytes]) -> Request | None:
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
        or not 0 < len(raw_id) <= MAX_ID_BYTES
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
def _template(common: bytes) -> Request | None:
    """The request without its id and prompt; None where it is not valid."""
    try:
        fields = unfold({b"common": common})
    except InvalidRequest:
        return None
    if any(name.encode() in fields for name in OWN_FIELDS):
        return None
    request = _parse_request({**fields, b"id": b"?", b"prompt": b"?"}, NO_DEFAULTS)
    return request if isinstance(request, Request) else None


def _refuse_unread(fields: Mapping[bytes, bytes], error: str) -> Refused | Unanswerable:
    """The outcome for an entry whose field ``common`` cannot be read.

    The client may be named there, unless the entry has a field ``client`` of its own.
    """
    if b"client" not in fields:
        return Unanswerable(error)
    reply_to = ""
    try:
        request_id, client = _parse_address(fields)
    except InvalidRequest as other:
        return Unanswerable(str(other))
    with contextlib.suppress(InvalidRequest):
        reply_to = _parse_reply_to(fields, client)
    return Refused(request_id, client, reply_to, Code.INVALID_REQUEST, error)


def _parse_request(
    fields: Mapping[bytes, bytes], defaults: Mapping[str, Any]
) -> Request | Refused | Unanswerable:
    try:
        request_id, client = _parse_address(fields)
    except InvalidRequest as error:
        return Unanswerable(str(error))
    reply_to = ""
    try:
        reply_to = _parse_reply_to(fields, client)
        return _parse_body(fields, request_id, client, reply_to, defaults)
    except InvalidRequest as error:
        return Refused(request_id, client, reply_to, Code.INVALID_REQUEST, str(error))


def _parse_address(fields: Mapping[bytes, bytes]) -> tuple[str, str]:
    raw = fields.get(b"id", b"")
    if not 0 < len(raw) <= MAX_ID_BYTES:
        raise InvalidRequest("id", f"give 1 to {MAX_ID_BYTES} bytes, not {len(raw)}")
    client = read_text(fields, "client") if b"client" in fields else DEFAULT_CLIENT
    if not is_name(client):
        raise InvalidRequest("client", NAME_RULE)
    return read_text(fields, "id"), client


def _parse_reply_to(fields: Mapping[bytes, bytes], client: str) -> str:
    reply_to = read_text(fields, "reply_to")
    if reply_to not in ("", f"replies:{client}"):
        raise InvalidRequest("reply_to", f"leave it out or give replies:{client}")
    return reply_to


def _parse_body(
    fields: Mapping[bytes, bytes],
    request_id: str,
    client: str,
    reply_to: str,
    defaults: Mapping[str, Any],
) -> Request:
    if len(fields) > MAX_FIELDS and len(fields.keys() - SYSTEM_FIELDS) > MAX_FIELDS:
        raise InvalidRequest("entry", f"has more than {MAX_FIELDS} fields")
    version = read_integer(fields, "v", WIRE_VERSION, 1, 2**31)
    if version != WIRE_VERSION:
        raise InvalidRequest("v", f"this yard speaks version {WIRE_VERSION}, not {version}")
    given = [name for name in ("tokens", "prompt", "messages") if name.encode() in fields]
    if len(given) != 1:
        raise InvalidRequest(
            "prompt", f"give exactly one of tokens, prompt, messages, not {given or 'none'}"
        )
    reasoning_ended, reasoning_parser_kwargs = parse_reasoning(fields)
    return Request(
        id=request_id,
        client=client,
        tokens=read_tokens(fields) if given == ["tokens"] else None,
        prompt=read_prompt(fields) if given == ["prompt"] else None,
        messages=parse_messages(fields[b"messages"]) if given == ["messages"] else None,
        model=read_text(fields, "model"),
        params=read_params(fields, defaults),
        stream=read_flag(fields, "stream"),
        reply_to=reply_to,
        priority=read_integer(fields, "priority", 0, -(2**31), 2**31 - 1),
        deadline_ms=read_integer(fields, "deadline", 0, 0, 2**53) or None,
        result_ttl_s=read_integer(fields, "result_ttl", DEFAULT_RESULT_TTL_S, 1, MAX_RESULT_TTL_S),
        tenant=read_text(fields, "tenant"),
        session=read_text(fields, "session"),
        metadata=read_json(fields, "metadata", object_decoder, {}),
        chat=parse_chat(fields, given[0]),
        cache_salt=read_text(fields, "cache_salt"),
        reasoning_ended=reasoning_ended,
        reasoning_parser_kwargs=reasoning_parser_kwargs,
    )


def parse_assignment(
    entry: str, fields: Mapping[bytes, bytes], defaults: Mapping[str, Any] = NO_DEFAULTS
) -> Assignment | None:
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
    if not isinstance(request, Request):
        if isinstance(request, Unanswerable):
            return None
        error = request.message
        request = Request(id=request.id, client=request.client, reply_to=request.reply_to)
    return Assignment(
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
    if text is None:
        return 0
    return int(text) if text.isdigit() and len(text) < _LONGEST_COUNT else None
