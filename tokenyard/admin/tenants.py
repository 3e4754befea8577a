"""Settings of tenants, and what each of them has waiting, running and had.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import redis
from msgspec import Struct

from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import Keys, is_tenant
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import (
    DEFAULTS,
    TenantSettings,
    decode_each,
    encode_tenant,
)
from tokenyard.scripts import Scripts

#: Tenants whose counters are read in one round trip.
_PAGE: Final = 1_000
#: Tries of a change that loses the race against other operators.
_MAX_TRIES: Final = 100
_COUNTERS: Final = ("waiting", "waiting_tokens", "running")
#: Field, width in ms and number of buckets of each window, as `lua/include/token_windows.lua` has
#: them.
_WINDOWS: Final = {"tokens_per_minute": ("m", 5_000, 13), "tokens_per_day": ("d", 1_800_000, 49)}
#: What can refuse a request.
_LIMITS: Final = tuple(name for name in TenantSettings.__struct_fields__ if name != "weight")
_FIELDS: Final = (
    *_COUNTERS,
    *(f"refused:{name}" for name in _LIMITS),
    *(f"refused_at:{name}" for name in _LIMITS),
)


class TenantView(Struct, frozen=True, kw_only=True):
    """A tenant at one moment. Without settings of its own it has the defaults."""

    name: str
    settings: TenantSettings = DEFAULTS
    is_set: bool = False  # an operator has set something
    is_readable: bool = True  # False: what is set cannot be read, and does not count
    waiting: int = 0  # requests
    waiting_tokens: int = 0
    running: int = 0  # requests
    service: float = 0.0  # weighted tokens by weight; who waits and has the least is next
    refused: Mapping[str, int] = MappingProxyType({})  # requests, by the limit
    refused_ms: Mapping[str, int] = MappingProxyType({})  # the last of them, unix ms, by the limit


class TenantChange(Struct, frozen=True, kw_only=True):
    """New settings of a tenant, or none. ``seen`` is what the change goes by."""

    name: str
    seen: bytes
    before: TenantSettings | None
    after: TenantSettings | None

    @property
    def packed(self) -> tuple[str, bytes, bytes]:
        """The change as `Scripts.configure` takes it."""
        return self.name, self.seen, b"" if self.after is None else encode_tenant(self.after)


def read_tenants(
    connection: redis.Redis, keys: Keys, names: Iterable[str] | None = None
) -> list[TenantView]:
    """Read all tenants that were set or have been served, by name; or those with these names."""
    run: Any = connection
    stored: dict[bytes, bytes] = run.hgetall(keys.tenants)
    service = {raw.decode(errors="replace"): score for raw, score in _scores(run, keys.service)}
    settings = decode_each(stored)
    known = sorted(set(names) if names is not None else {*settings, *filter(is_tenant, service)})
    return [
        TenantView(
            name=name,
            settings=settings.get(name) or DEFAULTS,
            is_set=name in settings,
            is_readable=settings.get(name, DEFAULTS) is not None,
            service=service.get(name, 0.0),
            **counters,
        )
        for name, counters in zip(known, _counters(connection, keys, known), strict=True)
    ]


def stored_tenants(connection: redis.Redis, keys: Keys) -> dict[str, bytes]:
    """The JSON of each tenant that has settings."""
    found: Any = connection.hgetall(keys.tenants)
    return {name.decode(errors="replace"): packed for name, packed in found.items()}


def set_tenant(
    connection: redis.Redis,
    keys: Keys,
    name: str,
    after: Callable[[TenantSettings], TenantSettings | None],
) -> TenantChange:
    """Change the settings of a tenant, whatever other operators do at the same time.

    ``after`` makes the new settings from the present ones; None removes them. Where nothing is to
    change, nothing is written.
    """
    for _ in range(_MAX_TRIES):
        seen = stored_tenants(connection, keys).get(name, b"")
        before = _present(seen)
        change = TenantChange(name=name, seen=seen, before=before, after=after(before or DEFAULTS))
        if change.packed[2] == seen or apply_changes(connection, keys, [change]):
            return change
    raise BrokerUnavailable(f"the settings of {name} were changed by others each time")


def changes_to(
    stored: Mapping[str, bytes], wanted: Mapping[str, TenantSettings]
) -> list[TenantChange]:
    """What is to change so that exactly the wanted tenants have settings, by name."""
    found = []
    for name in sorted({*stored, *wanted}):
        seen, after = stored.get(name, b""), wanted.get(name)
        before = _present(seen)
        if before != after or (seen and before is None):
            found.append(TenantChange(name=name, seen=seen, before=before, after=after))
    return found


def apply_changes(connection: redis.Redis, keys: Keys, changes: Sequence[TenantChange]) -> bool:
    """Make all changes at once; False where somebody else has changed one of these tenants."""
    return Scripts(connection, keys).configure([change.packed for change in changes])


def _present(seen: bytes) -> TenantSettings | None:
    """Stored settings; None without any that can be read."""
    return decode_each({b"one": seen})["one"] if seen else None


def read_windows(connection: redis.Redis, keys: Keys, name: str) -> dict[str, int]:
    """The tokens that count for a tenant in this minute and day, by limit; see `token_windows`."""
    run: Any = connection
    seconds, micros = run.time()
    now_ms = seconds * 1000 + micros // 1000
    fields: dict[bytes, bytes] = run.hgetall(keys.tenant(name))
    return {
        limit: sum(
            whole(fields.get(f"{mark}{at % count}".encode(), b"").removeprefix(f"{at} ".encode()))
            for at in range(now_ms // width - count + 1, now_ms // width + 1)
        )
        for limit, (mark, width, count) in _WINDOWS.items()
    }


def _scores(run: Any, key: str) -> Iterator[tuple[bytes, float]]:
    """The members of a sorted set, in pages."""
    for at in itertools.count(0, _PAGE):
        page = run.zrange(key, at, at + _PAGE - 1, withscores=True)
        yield from page
        if len(page) < _PAGE:
            return


def _counters(
    connection: redis.Redis, keys: Keys, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """What each tenant has waiting and running, and was refused; an invalid count is 0."""
    for at in range(0, len(names), _PAGE):
        pipeline = connection.pipeline(transaction=False)
        for name in names[at : at + _PAGE]:
            pipeline.hmget(keys.tenant(name), *_FIELDS)
        for values in pipeline.execute():
            counts = [max(0, whole(value)) for value in values]
            refusals = counts[len(_COUNTERS) :]
            yield {
                **dict(zip(_COUNTERS, counts, strict=False)),
                "refused": _present_ones(refusals[: len(_LIMITS)]),
                "refused_ms": _present_ones(refusals[len(_LIMITS) :]),
            }


def _present_ones(counts: Sequence[int]) -> dict[str, int]:
    return {name: count for name, count in zip(_LIMITS, counts, strict=True) if count}
