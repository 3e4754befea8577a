"""What tenants have used: requests, tokens and waits, by day and model.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import redis
from msgspec import Struct
from redis.exceptions import NoPermissionError

from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import FAILED, WAIT, day_before, is_day, outdated
from tokenyard.yard.reads import pages

#: Codes that are reported; `UNKNOWN` is of a result without one.
_CODES: Final = (*Code, "UNKNOWN")


class TenantUsage(Struct, frozen=True, kw_only=True):
    """What a tenant has used on a day (UTC) with a model."""

    tenant: str
    day: str  # 2026-11-23
    model: str
    requests: int = 0  # that ended
    tokens_in: int = 0
    tokens_cached: int = 0  # of those in, from a prefix cache
    tokens_out: int = 0
    failed: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=dict)  # those by code
    cancelled: int = 0
    #: Time from acceptance to the first dispatch: upper ends of buckets, each twice as wide as the
    #: one before it; None without any wait.
    wait_p50_ms: int | None = None
    wait_p99_ms: int | None = None


class UsageReport(Struct, frozen=True, kw_only=True):
    """What one tenant has used in some days."""

    rows: list[TenantUsage]  # by day and model
    days: list[TenantUsage]  # of all models, every day of them, the oldest first
    total: TenantUsage


def read_report(yard: Yard, tenant: str, days: int) -> UsageReport:
    """Read the usage of a tenant in the last days, today included."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    pipeline.time()
    pipeline.hgetall(yard.keys.usage(tenant))
    (seconds, _), fields = pipeline.execute()
    dates = list(reversed([day_before(int(seconds), back) for back in range(days)]))
    counts = {at: one for at, one in _counts(fields).items() if at[0] in dates}
    by_day = {date: Counter[str]() for date in dates}
    for (date, _), one in counts.items():
        by_day[date].update(one)
    return UsageReport(
        rows=[_row(tenant, date, model, one) for (date, model), one in sorted(counts.items())],
        days=[_row(tenant, date, "", one) for date, one in by_day.items()],
        total=_row(tenant, "", "", sum(by_day.values(), Counter[str]())),
    )


def read_usage(yard: Yard, tenants: Sequence[str], days: int, model: str = "") -> list[TenantUsage]:
    """The usage of tenants in the last days, today included, by tenant, day and model."""
    seconds, _ = yard.connection.time()
    first = day_before(int(seconds), days - 1)
    found: list[TenantUsage] = []
    for page in pages(tenants):
        pipeline: Any = yard.connection.pipeline(transaction=False)
        for tenant in page:
            pipeline.hgetall(yard.keys.usage(tenant))
        for tenant, fields in zip(page, pipeline.execute(), strict=True):
            _prune(yard.connection, yard.keys.usage(tenant), outdated(fields, int(seconds)))
            found += [
                _row(tenant, day, name, one)
                for (day, name), one in sorted(_counts(fields).items())
                if day >= first and model in {"", name}
            ]
    return found


def _prune(connection: redis.Redis, key: str, old: Sequence[bytes]) -> None:
    """Delete what is older than the oldest day to keep, where our user may."""
    if old:
        with contextlib.suppress(NoPermissionError):
            connection.hdel(key, *old)


def quantile(waits: Mapping[int, int], share: float) -> int | None:
    """The bucket below whose upper end this share of the waits is; None without waits."""
    total, seen = sum(waits.values()), 0
    for bucket in sorted(waits):
        seen += waits[bucket]
        if total and seen >= share * total:
            return bucket
    return None


def _counts(fields: Mapping[bytes, bytes]) -> dict[tuple[str, str], Counter[str]]:
    """The counts of each day and model; fields that are none of ours are left out."""
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for raw, value in fields.items():
        digits, _, rest = raw.partition(b" ")
        model, _, what = rest.decode(errors="replace").rpartition(" ")
        if is_day(digits):
            counts[digits.decode(), model][what] = max(0, whole(value))
    return counts


def _row(tenant: str, day: str, model: str, found: Mapping[str, int]) -> TenantUsage:
    waits = dict(_waits(found.items()))
    return TenantUsage(
        tenant=tenant,
        day=f"{day[:4]}-{day[4:6]}-{day[6:]}" if day else "",
        model=model,
        requests=found.get("requests", 0),
        tokens_in=found.get("in", 0),
        tokens_cached=found.get("cached", 0),
        tokens_out=found.get("out", 0),
        failed=found.get("failed", 0),
        failures={str(code): found[name] for code in _CODES if (name := FAILED + code) in found},
        cancelled=found.get("cancelled", 0),
        wait_p50_ms=quantile(waits, 0.5),
        wait_p99_ms=quantile(waits, 0.99),
    )


def _waits(counts: Iterable[tuple[str, int]]) -> Iterator[tuple[int, int]]:
    for what, count in counts:
        bucket = what.removeprefix(WAIT)
        if bucket != what and bucket.isdecimal() and len(bucket) < 16:
            yield int(bucket), count
