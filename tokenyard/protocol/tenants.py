"""What an operator sets for a tenant, and how what it uses is counted."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from tokenyard.protocol.keys import MAX_TENANT, PriorityClass, is_tenant
from tokenyard.protocol.streams import decoded, digits
from tokenyard.protocol.wire import MAX_STREAM_INTERVAL_MS

#: What `is_tenant` asks for.
TENANT_RULE: Final = f"use 1 to {MAX_TENANT} of A-Z a-z 0-9 _ . : @ -"

#: A share a thousand times the usual one, or a thousandth of it.
Weight = Annotated[float, Meta(ge=0.001, le=1000.0)]
#: 0 is no limit. Scripts count exactly up to here.
Limit = Annotated[int, Meta(ge=0, le=2**53)]


class TenantSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The share and the limits of a tenant. Limits that are 0 or None do not apply.

    Redis keeps it as JSON without the defaults. New fields come last, with defaults: a reader
    of an earlier release leaves them out.
    """

    weight: Weight = 1.0
    max_waiting_requests: Limit = 0
    max_waiting_tokens: Limit = 0  # of prompts
    max_running_requests: Limit = 0
    tokens_per_minute: Limit = 0  # prompts and answers
    tokens_per_day: Limit = 0
    max_tokens: Limit = 0  # of one request
    models: Annotated[list[str], Meta(min_length=1)] | None = None
    classes: Annotated[list[PriorityClass], Meta(min_length=1)] | None = None
    stream_interval_ms: Annotated[int, Meta(ge=0, le=MAX_STREAM_INTERVAL_MS)] = 0  # by HTTP


#: The settings that can refuse a request.
LIMITS: Final = tuple(
    name
    for name in TenantSettings.__struct_fields__
    if name not in ("weight", "stream_interval_ms")
)
DEFAULTS: Final = TenantSettings()


def encode_tenant(settings: TenantSettings) -> bytes:
    """As JSON."""
    return msgspec.json.encode(settings)


#: Inverse of `encode_tenant`; raises `msgspec.MsgspecError`.
decode_tenant: Final = msgspec.json.Decoder(TenantSettings).decode


def decode_tenants(fields: Mapping[bytes, bytes]) -> dict[str, TenantSettings]:
    """The hash `tenants` by name; those that cannot be read have the `DEFAULTS`."""
    return {name: settings or DEFAULTS for name, settings in decode_each(fields).items()}


def decode_each(fields: Mapping[bytes, bytes]) -> dict[str, TenantSettings | None]:
    """The hash `tenants` by name, in order; None for settings that cannot be read.

    Fields whose name cannot be a tenant's are left out.
    """
    found = {}
    for raw, packed in sorted(fields.items()):
        name = raw.decode(errors="replace")
        if is_tenant(name):
            found[name] = decoded(packed, decode_tenant)
    return found


# The windows over which a tenant's tokens and refusals are counted; scripts write them.
#
# Each is a ring of buckets in the hash of the tenant. It slides by one bucket, and has one more
# than it is long, so that no span of that length has more tokens than the limit.

#: Longer numbers are none of the scripts'.
_MOST_DIGITS: Final = 15


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """One window: the limit's name in `TenantSettings`, and the form of its ring."""

    limit: str
    mark: str
    width_ms: int
    count: int

    @property
    def fields(self) -> list[str]:
        """The fields of its buckets."""
        return [f"{self.mark}{number}" for number in range(self.count)]

    def read(self, values: Sequence[bytes | None], now_ms: int) -> tuple[int, int]:
        """The tokens in the window, and in how many ms the last of them have left it."""
        now, tokens, newest = now_ms // self.width_ms, 0, None
        for value in values:
            number, _, sum_ = (value or b"").partition(b" ")
            at, used = digits(number, _MOST_DIGITS), digits(sum_, _MOST_DIGITS)
            if at is not None and used and abs(now - at) < self.count:
                tokens += used
                newest = max(newest or 0, at)
        if newest is None:
            return 0, 0
        return tokens, (newest + self.count) * self.width_ms - now_ms


MINUTE: Final = TokenWindow("tokens_per_minute", "m", 5_000, 13)
DAY: Final = TokenWindow("tokens_per_day", "d", 1_800_000, 49)


def refusals_of(limit: str) -> TokenWindow:
    """The requests that a limit has refused in this hour and the one before."""
    return TokenWindow(limit, f"refused:{limit}:", 3_600_000, 2)


# The fields of ``usage:<tenant>``, what a tenant has used: ``<yyyymmdd> <model> <what>``.
#
# `tenant_sums.lua` writes them, by the server's day in UTC.

#: Before the upper end of a bucket, a power of two of ms: first dispatches after such a wait.
WAIT: Final = "wait:"
#: Before the code of an error: requests that failed so.
FAILED: Final = "failed:"
#: Bytes of a model's name that are kept.
MOST_OF_MODEL: Final = 200
#: Days that usage is kept, today included.
KEPT_DAYS: Final = 62


def day_before(now_s: float, back: int) -> str:
    """The day so many days ago, in digits."""
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    return f"{now - datetime.timedelta(back):%Y%m%d}"


def is_day(text: bytes) -> bool:
    """Whether this is a day in digits."""
    return len(text) == len("yyyymmdd") and text.isdigit()


def field_of(day: str, model: str, what: str) -> bytes:
    """The name of a field."""
    return b"%b %b %b" % (day.encode(), model.encode()[:MOST_OF_MODEL], what.encode())


def outdated(fields: Iterable[bytes], now_s: float) -> list[bytes]:
    """Those that are older than what is kept."""
    oldest = day_before(now_s, KEPT_DAYS - 1).encode()
    days = ((name, name.partition(b" ")[0]) for name in fields)
    return [name for name, day in days if is_day(day) and day < oldest]
