"""Settings of tenants, and what each of them has waiting, running and had.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from tokenyard.protocol.keys import MAX_TENANT, PRIORITY_CLASSES, Keys, Yard, intake_name, is_tenant
from tokenyard.protocol.streams import unix_ms, whole
from tokenyard.protocol.tenants import (
    DAY,
    DEFAULTS,
    LIMITS,
    MINUTE,
    TenantSettings,
    decode_each,
    refusals_of,
)
from tokenyard.protocol.texts import printable
from tokenyard.yard.reads import glob_literal, intake_lengths, pages

#: Tenants that are read in one round trip.
_PAGE: Final = 1_000
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
    refused: dict[str, int] = msgspec.field(default_factory=dict)  # requests ever, by the limit
    #: In this hour and the one before.
    refused_lately: dict[str, int] = msgspec.field(default_factory=dict)
    #: The last of them, unix ms.
    refused_ms: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def is_held(self) -> bool:
        """Whether it has requests that wait since it may run no more of them."""
        most = self.settings.max_running_requests
        return bool(most) and self.running >= most and self.waiting > 0


def limits_used(view: TenantView, windows: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """What counts now for each limit that somebody has set, and the limit, by its name.

    ``windows`` is what `read_windows` found.
    """
    counts = {
        "max_waiting_requests": view.waiting,
        "max_waiting_tokens": view.waiting_tokens,
        "max_running_requests": view.running,
        **windows,
    }
    limits = ((name, used, getattr(view.settings, name)) for name, used in counts.items())
    return {name: (used, most) for name, used, most in limits if most}


def read_tenants(yard: Yard, names: Iterable[str] | None = None) -> list[TenantView]:
    """Read all tenants that were set or have been served, by name; or those with these names."""
    run: Any = yard.connection
    if names is None:
        stored: dict[bytes, bytes] = run.hgetall(yard.keys.tenants)
        scores = run.zscan_iter(yard.keys.service, count=_PAGE)
        service = {raw.decode(errors="replace"): score for raw, score in scores}
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
    names = (intake_name(priority_class, name) for priority_class in PRIORITY_CLASSES)
    return dict(zip(PRIORITY_CLASSES, intake_lengths(yard, names), strict=True))


def stored_tenants(yard: Yard) -> dict[str, bytes]:
    """The JSON of each tenant that has settings."""
    found: Any = yard.connection.hgetall(yard.keys.tenants)
    return {name.decode(errors="replace"): packed for name, packed in found.items()}


def read_windows(yard: Yard, names: Iterable[str]) -> list[dict[str, int]]:
    """The tokens that count for each tenant in this minute and day, by limit."""
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


def _counters(yard: Yard, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What each tenant has waiting and running, and was refused; an invalid count is 0."""
    for page in pages(names, _PAGE):
        pipeline: Any = yard.connection.pipeline(transaction=False)
        pipeline.time()
        for name in page:
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


#: So many are sorted by name; of more, those are listed that were served, who had most first.
MOST_SORTED: Final = 2_000
#: Names that a search visits, about, and those that it returns.
MOST_VISITED: Final = 50_000
MOST_FOUND: Final = 200


@dataclass(frozen=True, slots=True)
class TenantNames:
    """Some names of tenants."""

    names: Sequence[str]
    total: int  # of which they are a part
    is_whole: bool = True  # False: there are others, which only a search finds


def list_tenants(yard: Yard, first: int, count: int) -> TenantNames:
    """Names of those that somebody has set or that were served, from the ``first`` on."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    pipeline.hlen(yard.keys.tenants)
    pipeline.zcard(yard.keys.service)
    have_settings, served = pipeline.execute()
    if have_settings + served > MOST_SORTED:
        # By ranks from the end: who has had most comes first.
        found: Any = yard.connection.zrange(yard.keys.service, -first - count, -first - 1)
        names = _tenants(reversed(found)) if first < served else []
        return TenantNames(names, served, is_whole=False)
    pipeline.hgetall(yard.keys.tenants)
    pipeline.zrange(yard.keys.service, 0, -1)
    known = sorted({name for names in pipeline.execute() for name in _tenants(names)})
    return TenantNames(known[first : first + count], len(known))


def search_tenants(yard: Yard, text: str) -> TenantNames:
    """Names that contain a text, also in other letters' case."""
    if len(text) > MAX_TENANT:
        return TenantNames((), 0)
    pattern = _any_case(f"*{glob_literal(text)}*")
    found: set[str] = set()
    is_whole = True
    for scan, key in (
        (yard.connection.hscan, yard.keys.tenants),
        (yard.connection.zscan, yard.keys.service),
    ):
        cursor, visited = 0, 0
        while visited < MOST_VISITED and len(found) <= MOST_FOUND:
            run: Any = scan
            cursor, page = run(key, cursor, match=pattern, count=_PAGE)
            visited += _PAGE
            found.update(_tenants(one if isinstance(one, bytes) else one[0] for one in page))
            if not cursor:
                break
        is_whole = is_whole and not cursor
    names = sorted(found, key=lambda name: (name != text, name))
    return TenantNames(names[:MOST_FOUND], len(names), is_whole and len(names) <= MOST_FOUND)


def _any_case(pattern: str) -> str:
    return re.sub("[A-Za-z]", lambda match: f"[{match[0].lower()}{match[0].upper()}]", pattern)


def _tenants(names: Iterator[bytes] | Sequence[bytes] | Any) -> list[str]:
    decoded = (name.decode(errors="replace") for name in names)
    return [name for name in decoded if is_tenant(name)]


Word = TypeVar("Word", bound=str)
#: How no restriction of models or classes is shown, and may be given.
ALL: Final = "all"


def restriction(words: Sequence[Word]) -> list[Word] | None:
    """The models or classes of a list that an operator gave; None: it restricts nothing."""
    return list(words) if words and list(words) != [ALL] else None


def words_of(settings: TenantSettings | None) -> str:
    """Settings in one line: ``weight 2, tokens_per_day 1,000``."""
    return "none" if settings is None else ", ".join(_items(settings))


def differences(before: TenantSettings | None, after: TenantSettings | None) -> str:
    """What a change does, in one line."""
    if before is None or after is None:
        return words_of(after)
    return ", ".join(
        f"{name} {value_text(name, old)} -> {value_text(name, new)}"
        for name, old, new in _pairs(before, after)
        if old != new
    )


def value_text(name: str, value: object) -> str:
    """The value of a setting for people."""
    if value is None:
        return ALL
    if isinstance(value, list):
        return printable("+".join(map(str, value)))
    if name == "weight":
        return f"{value:g}"
    return f"{value:,}" if value else "no limit"


def failures_text(failures: Mapping[str, int]) -> str:
    """Failed requests by code, the most frequent first: ``3 WORKER_LOST, 1 POISONED``."""
    listed = sorted(failures.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{count:,} {code}" for code, count in listed)


def _items(settings: TenantSettings) -> Iterator[str]:
    yield f"weight {settings.weight:g}"
    for name, value, default in _pairs(settings, DEFAULTS):
        if name != "weight" and value != default:
            yield f"{name} {value_text(name, value)}"


def _pairs(one: TenantSettings, other: TenantSettings) -> Iterator[tuple[str, object, object]]:
    for name in TenantSettings.__struct_fields__:
        yield name, getattr(one, name), getattr(other, name)


def as_fields(settings: TenantSettings | None) -> dict[str, object] | None:
    """Settings with their defaults, for JSON."""
    return None if settings is None else msgspec.structs.asdict(settings)
