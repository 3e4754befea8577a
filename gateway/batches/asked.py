"""What a client asks of a batch: the body of ``POST /v1/batches``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.batches.jobs import read_window
from gateway.batches.records import PREFIX, BatchRecord
from gateway.http.errors import GatewayError, invalid
from gateway.http.records import durable_id
from gateway.responses.options import PATH as RESPONSES_URL
from tokenyard.batch.lines import CHAT_URL, COMPLETIONS_URL

ENDPOINTS: Final = (CHAT_URL, COMPLETIONS_URL, RESPONSES_URL)
#: Seconds after which a file may expire, as OpenAI has them.
LIFETIMES_S: Final = range(3600, 30 * 86_400 + 1)
#: Metadata within OpenAI's limits.
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
_Metadata = Annotated[dict[_Key, _Value], Meta(max_length=16)]
#: Where a field of the body is at fault, as msgspec's errors end.
_PLACE: Final = re.compile(r" - at (`key` in )?`\$\.(?P<field>\w+)[^`]*`$")


class _Lifetime(Struct, forbid_unknown_fields=True):
    """How long the outputs exist."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=LIFETIMES_S[0], le=LIFETIMES_S[-1])]


class _Asked(Struct, forbid_unknown_fields=True):
    """The body."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: _Metadata | None = None
    output_expires_after: _Lifetime | None = None


def read_batch(body: dict[str, Any], client: str, key: str | None, now: int) -> BatchRecord:
    """The batch of a body, named by the idempotency key if there is one; raises `GatewayError`."""
    try:
        asked = msgspec.convert(body, _Asked)
    except msgspec.ValidationError as error:
        raise _fault(str(error)) from error
    if asked.endpoint not in ENDPOINTS:
        batches = f"batches are for {', '.join(ENDPOINTS)}"
        raise invalid("endpoint", f"{batches}, not {asked.endpoint[:80]!r}")
    read_window(asked.completion_window)
    lifetime = asked.output_expires_after
    return BatchRecord(
        id=PREFIX + durable_id(client, None if key is None else f"batch/{key}"),
        input_file_id=asked.input_file_id,
        endpoint=asked.endpoint,
        completion_window=asked.completion_window,
        created_at=now,
        metadata=asked.metadata,
        output_expires_after_s=None if lifetime is None else lifetime.seconds,
    )


def _fault(text: str) -> GatewayError:
    """The error of a body in msgspec's words, by the field; it may repeat what the client wrote."""
    if found := _PLACE.search(text):
        name, message = found["field"], text[: found.start()]
    else:  # a field is missing or unknown
        name, message = text.partition("`")[2].rstrip("`"), text
    return invalid(name[:80], message[:200])
