"""The commands in a guest's inbox. Pure; an entry is hostile until it is parsed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import Struct

from tokenyard.protocol.digest import entry_digest
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.foreign_json import BadJson, ForeignJson
from tokenyard.protocol.keys import is_name
from tokenyard.protocol.parse import parse_request, unfold
from tokenyard.protocol.receipts import MAX_RECEIPT_BYTES, MOST_ENDED, owns
from tokenyard.protocol.settings import LEAST_GUEST_TTL_S
from tokenyard.protocol.wire import (
    COMMON_FIELDS,
    DEFAULT_RESULT_TTL_S,
    MAX_ID_BYTES,
    OWN_FIELDS,
    Refused,
    ReplyKind,
    Request,
    RequestTemplate,
    Unanswerable,
)

#: The priority classes of guests; `high` would make others wait.
GuestClass = Literal["normal", "low"]
CLASSES: Final[tuple[GuestClass, ...]] = ("normal", "low")

_ids_decoder = ForeignJson[list[str]](list[str])
_KEPT: Final = {name.encode() for name in COMMON_FIELDS | OWN_FIELDS}


class ReplyAddress(Struct, frozen=True):
    """Where to send a receipt or a refusal."""

    client: str
    kind: ReplyKind = "flat"
    request_id: str = ""
    receipt: str = ""  # empty: only refusals are sent, as results


class Submission(Struct, frozen=True):
    """A request, as `submit` writes it into the intake."""

    address: ReplyAddress
    request: Request
    template: RequestTemplate
    digest: str
    priority_class: GuestClass
    watched: str = ""  # the client, if its disappearance is to cancel the request


class CancelCommand(Struct, frozen=True):
    """Cancels a request of the guest."""

    client: str
    request_id: str


class LeaseRenewal(Struct, frozen=True):
    """A client renews its lease, or leaves."""

    client: str
    leaves: bool
    ended: list[str]


class Unreadable(Struct, frozen=True):
    """Anything else; it is answered where it has an address."""

    reason: str
    address: ReplyAddress | None = None


GuestCommand = Submission | CancelCommand | LeaseRenewal | Unreadable


def parse_guest_command(
    guest: str, fields: Mapping[bytes, bytes], most_ttl_s: int, tenant: str = ""
) -> GuestCommand:
    """Parse an entry of the inbox of ``guest``; never raises.

    Its requests are those of ``tenant``, whatever they say. The time to live of a result is limited
    to the bounds for guests.
    """
    try:
        fields = unfold(fields)
        client = _client(guest, fields)
    except InvalidRequest as error:
        return Unreadable(str(error))
    match fields.get(b"do", b"submit"):
        case b"submit":
            return _submission(client, fields, most_ttl_s, tenant)
        case b"cancel":
            return _cancel_command(client, fields)
        case b"attend":
            return _lease_renewal(client, fields)
    return Unreadable("do: use submit, cancel or attend")


def _client(guest: str, fields: Mapping[bytes, bytes]) -> str:
    try:
        client = fields.get(b"client", guest.encode()).decode()
    except UnicodeDecodeError:
        client = ""
    if not is_name(client) or not owns(guest, client):
        raise InvalidRequest("client", f"use {guest} or a name that begins with {guest}-")
    return client


def _submission(
    client: str, fields: Mapping[bytes, bytes], most_ttl_s: int, tenant: str
) -> GuestCommand:
    own = {name: value for name, value in fields.items() if name in _KEPT - {b"tenant"}}
    own[b"client"] = client.encode()
    if tenant:
        own[b"tenant"] = tenant.encode()
    own[b"result_ttl"] = _ttl(own.get(b"result_ttl", b""), most_ttl_s)
    request = parse_request(own)
    if isinstance(request, Unanswerable):
        return Unreadable(request.reason)
    kind: ReplyKind = "frame" if request.reply_to else "flat"
    try:
        receipt = _receipt(fields)
    except InvalidRequest as error:
        return Unreadable(str(error), ReplyAddress(client, kind, request.id))
    address = ReplyAddress(client, kind, request.id, receipt)
    if isinstance(request, Refused):
        return Unreadable(request.message, address)
    if request.priority < 0:
        return Unreadable("priority: must not be below 0 for a guest", address)
    wanted = fields.get(b"class", b"normal")
    for name in CLASSES:
        if name.encode() == wanted:
            return Submission(
                address,
                request,
                _template(own, request, is_late_refused=fields.get(b"refuse_late") == b"1"),
                entry_digest(own),
                name,
                client if fields.get(b"attach") == b"1" else "",
            )
    return Unreadable(f"class: use {' or '.join(CLASSES)}", address)


def _ttl(raw: bytes, most_ttl_s: int) -> bytes:
    """Within the bounds; a value that is not a number is left for `parse_request` to refuse."""
    if raw and not (raw.isdigit() and len(raw) < 10):
        return raw
    asked = int(raw) if raw else DEFAULT_RESULT_TTL_S
    return b"%d" % min(max(asked, LEAST_GUEST_TTL_S), most_ttl_s)


def _receipt(fields: Mapping[bytes, bytes]) -> str:
    raw = fields.get(b"receipt", b"")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = ""
    if len(raw) > MAX_RECEIPT_BYTES or (raw and not text):
        raise InvalidRequest("receipt", f"give at most {MAX_RECEIPT_BYTES} bytes of UTF-8")
    return text


def _template(
    own: Mapping[bytes, bytes], request: Request, *, is_late_refused: bool
) -> RequestTemplate:
    """What `submit` writes beside id and prompt: the fields as the guest gave them.

    A default that the guest gave is kept, since the model's own default would replace it.
    """
    texts = {
        name.decode(): value.decode()
        for name, value in own.items()
        if name.decode() in COMMON_FIELDS
    }
    [field] = {name.decode() for name in own} & (OWN_FIELDS - {"id"})
    common = msgspec.json.encode(texts).decode()
    deadline_ms = (request.deadline_ms or 0) if is_late_refused else 0
    return RequestTemplate(request.client, field, common, len(common), deadline_ms)


def _cancel_command(client: str, fields: Mapping[bytes, bytes]) -> GuestCommand:
    raw = fields.get(b"id", b"")
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        return Unreadable("id: is not UTF-8")
    if not 0 < len(raw) <= MAX_ID_BYTES:
        return Unreadable(f"id: give 1 to {MAX_ID_BYTES} bytes, not {len(raw)}")
    return CancelCommand(client, name)


def _lease_renewal(client: str, fields: Mapping[bytes, bytes]) -> GuestCommand:
    try:
        ended = _ids_decoder.decode(fields.get(b"ended", b"[]"))
    except BadJson:
        return Unreadable("ended: give a JSON array of ids")
    if len(ended) > MOST_ENDED:
        return Unreadable(f"ended: give at most {MOST_ENDED} ids")
    return LeaseRenewal(client, fields.get(b"leave") == b"1", ended)
