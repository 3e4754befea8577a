"""Settings of tenants, and what each of them has waiting, running and had.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import (
    PRIORITY_CLASSES,
    Keys,
    intake_name,
    is_tenant,
)
from tokenyard.protocol.streams import unix_ms, whole
from tokenyard.protocol.tenants import (
    DEFAULTS,
    LIMITS,
    TenantSettings,
    decode_each,
    encode_tenant,
)
from tokenyard.protocol.token_windows import DAY, MINUTE, refusals_of
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts

#: Tenants whose counters are read in one round trip.
_PAGE: Final = 1_000
#: Tries of a change that loses the race against other operators.
_MAX_TRIES: Final = 100
_COUNTERS: Final = ("waiting", "waiting_tokens", "running")
_LATELY: Final = tuple(refusals_of(name) for name in LIMITS)
_FIELDS: Final = (
    *_COUNTERS,
    *(f"refused:{name}" for name in LIMITS),
    *(f"refused_at:{name}" for name in LIMITS),
    *(name for window in _LATELY for name in window.fields),
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
    refused: Mapping[str, int] = MappingProxyType({})  # requests ever, by the limit
    refused_lately: Mapping[str, int] = MappingProxyType({})  # in this hour and the one before
    refused_ms: Mapping[str, int] = MappingProxyType({})  # the last of them, unix ms, by the limit

    @property
    def is_held(self) -> bool:
        """Whether it has requests that wait since it may run no more of them."""
        most = self.settings.max_running_requests
        return bool(most) and self.running >= most and self.waiting > 0


class LimitUse(Struct, frozen=True):
    """A limit that somebody has set, and what counts for it now."""

    name: str
    most: int
    used: int


def limits_used(view: TenantView, windows: Mapping[str, int]) -> list[LimitUse]:
    """The limits of a tenant that fill up; ``windows`` is what `read_windows` found."""
    counts = {
        "max_waiting_requests": view.waiting,
        "max_waiting_tokens": view.waiting_tokens,
        "max_running_requests": view.running,
        **windows,
    }
    limits = ((name, getattr(view.settings, name), used) for name, used in counts.items())
    return [LimitUse(name, most, used) for name, most, used in limits if most]


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


def read_tenants(yard: Yard, names: Iterable[str] | None = None) -> list[TenantView]:
    """Read all tenants that were set or have been served, by name; or those with these names."""
    run: Any = yard.connection
    if names is None:
        stored: dict[bytes, bytes] = run.hgetall(yard.keys.tenants)
        service = {
            raw.decode(errors="replace"): score for raw, score in _scores(run, yard.keys.service)
        }
        known = sorted({*decode_each(stored), *filter(is_tenant, service)})
    else:
        known = sorted(set(names))
        stored, service = _of(run, yard.keys, known) if known else ({}, {})
    settings = decode_each(stored)
    return [
        TenantView(
            name=name,
            settings=settings.get(name) or DEFAULTS,
            is_set=name in settings,
            is_readable=settings.get(name, DEFAULTS) is not None,
            service=service.get(name, 0.0),
            **counters,
        )
        for name, counters in zip(known, _counters(yard, known), strict=True)
    ]


def read_held(yard: Yard, name: str) -> dict[str, int]:
    """How many requests of a tenant wait in each class."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for priority_class in PRIORITY_CLASSES:
        pipeline.xlen(yard.keys.intake(intake_name(priority_class, name)))
    return dict(zip(PRIORITY_CLASSES, pipeline.execute(), strict=True))


def stored_tenants(yard: Yard) -> dict[str, bytes]:
    """The JSON of each tenant that has settings."""
    found: Any = yard.connection.hgetall(yard.keys.tenants)
    return {name.decode(errors="replace"): packed for name, packed in found.items()}


def set_tenant(
    yard: Yard,
    name: str,
    after: Callable[[TenantSettings], TenantSettings | None],
) -> TenantChange:
    """Change the settings of a tenant, whatever other operators do at the same time.

    ``after`` makes the new settings from the present ones; None removes them. Where nothing is to
    change, nothing is written.
    """
    for _ in range(_MAX_TRIES):
        found: Any = yard.connection.hget(yard.keys.tenants, name)
        seen = bytes(found or b"")
        before = _present(seen)
        change = TenantChange(name=name, seen=seen, before=before, after=after(before or DEFAULTS))
        if change.packed[2] == seen or apply_changes(yard, [change]):
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


def apply_changes(yard: Yard, changes: Sequence[TenantChange]) -> bool:
    """Make all changes at once; False where somebody else has changed one of these tenants."""
    return Scripts(yard).configure([change.packed for change in changes])


def _present(seen: bytes) -> TenantSettings | None:
    """Stored settings; None without any that can be read."""
    return decode_each({b"one": seen})["one"] if seen else None


def read_windows(yard: Yard, name: str) -> dict[str, int]:
    """The tokens that count for a tenant in this minute and day, by limit; see `token_windows`."""
    [found] = read_each_windows(yard, [name])
    return found


def read_each_windows(yard: Yard, names: Iterable[str]) -> list[dict[str, int]]:
    """The same for several tenants, in their order."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    pipeline.time()
    for name in names:
        pipeline.hmget(yard.keys.tenant(name), *MINUTE.fields, *DAY.fields)
    now, *found = pipeline.execute()
    now_ms = unix_ms(now)
    return [
        {
            MINUTE.limit: MINUTE.read(values[: MINUTE.count], now_ms)[0],
            DAY.limit: DAY.read(values[MINUTE.count :], now_ms)[0],
        }
        for values in found
    ]


def _of(run: Any, keys: Keys, names: Sequence[str]) -> tuple[dict[bytes, bytes], dict[str, float]]:
    """What is stored of these tenants, and their service."""
    pipeline = run.pipeline(transaction=False)
    pipeline.hmget(keys.tenants, names)
    for name in names:
        pipeline.zscore(keys.service, name)
    packed, *scores = pipeline.execute()
    stored = {name.encode(): one for name, one in zip(names, packed, strict=True) if one}
    return stored, dict(zip(names, (score or 0.0 for score in scores), strict=True))


def _scores(run: Any, key: str) -> Iterator[tuple[bytes, float]]:
    """The members of a sorted set, in pages."""
    for at in itertools.count(0, _PAGE):
        page = run.zrange(key, at, at + _PAGE - 1, withscores=True)
        yield from page
        if len(page) < _PAGE:
            return


def _counters(yard: Yard, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What each tenant has waiting and running, and was refused; an invalid count is 0."""
    for at in range(0, len(names), _PAGE):
        pipeline: Any = yard.connection.pipeline(transaction=False)
        pipeline.time()
        for name in names[at : at + _PAGE]:
            pipeline.hmget(yard.keys.tenant(name), *_FIELDS)
        now, *found = pipeline.execute()
        now_ms = unix_ms(now)
        for values in found:
            known = iter(values)
            counts, refused, refused_ms = (
                [max(0, whole(value)) for value in itertools.islice(known, count)]
                for count in (len(_COUNTERS), len(LIMITS), len(LIMITS))
            )
            lately = [
                window.read(list(itertools.islice(known, window.count)), now_ms)[0]
                for window in _LATELY
            ]
            yield {
                **dict(zip(_COUNTERS, counts, strict=True)),
                "refused": _present_ones(refused),
                "refused_ms": _present_ones(refused_ms),
                "refused_lately": _present_ones(lately),
            }


def _present_ones(counts: Sequence[int]) -> dict[str, int]:
    return {name: count for name, count in zip(LIMITS, counts, strict=True) if count}
