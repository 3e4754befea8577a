"""What tenants have used: requests, tokens and waits, by day and model.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import redis
from msgspec import Struct
from redis.exceptions import NoPermissionError

from tokenyard.protocol.keys import Keys
from tokenyard.protocol.streams import whole

#: Tenants that are read in one round trip.
_PAGE: Final = 100
_WAIT: Final = "wait:"
#: Days that usage is kept; older ones are deleted by whoever reads it.
KEPT_DAYS: Final = 62


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
    cancelled: int = 0
    #: Time from acceptance to the first dispatch: upper ends of buckets, each twice as wide as the
    #: one before it; None without any wait.
    wait_p50_ms: int | None = None
    wait_p99_ms: int | None = None


def read_usage(
    connection: redis.Redis, keys: Keys, tenants: Sequence[str], days: int, model: str = ""
) -> list[TenantUsage]:
    """The usage of tenants in the last days, today included, by tenant, day and model."""
    seconds, _ = connection.time()
    today = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).date()
    first, oldest = (
        f"{today - datetime.timedelta(count - 1):%Y%m%d}" for count in (days, KEPT_DAYS)
    )
    found: list[TenantUsage] = []
    for at in range(0, len(tenants), _PAGE):
        page = tenants[at : at + _PAGE]
        pipeline: Any = connection.pipeline(transaction=False)
        for tenant in page:
            pipeline.hgetall(keys.usage(tenant))
        for tenant, fields in zip(page, pipeline.execute(), strict=True):
            _prune(connection, keys.usage(tenant), fields, oldest)
            found += [
                one
                for one in _usage(tenant, fields)
                if one.day.replace("-", "") >= first and model in {"", one.model}
            ]
    return found


def _prune(connection: redis.Redis, key: str, fields: Mapping[bytes, bytes], oldest: str) -> None:
    """Delete what is older than the oldest day to keep, where our user may."""
    days = {name: name.partition(b" ")[0] for name in fields}
    old = [name for name, day in days.items() if _is_day(day) and day < oldest.encode()]
    if old:
        with contextlib.suppress(NoPermissionError):
            connection.hdel(key, *old)


def _is_day(text: bytes) -> bool:
    return len(text) == len("yyyymmdd") and text.isdigit()


def quantile(waits: Mapping[int, int], share: float) -> int | None:
    """The bucket below whose upper end this share of the waits is; None without waits."""
    total, seen = sum(waits.values()), 0
    for bucket in sorted(waits):
        seen += waits[bucket]
        if total and seen >= share * total:
            return bucket
    return None


def _usage(tenant: str, fields: Mapping[bytes, bytes]) -> Iterator[TenantUsage]:
    """One for each day and model; fields that are none of ours are left out."""
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for raw, value in fields.items():
        digits, _, rest = raw.partition(b" ")
        model, _, what = rest.decode(errors="replace").rpartition(" ")
        if _is_day(digits):
            counts[digits.decode(), model][what] = max(0, whole(value))
    for (day, model), found in sorted(counts.items()):
        waits = dict(_waits(found.items()))
        yield TenantUsage(
            tenant=tenant,
            day=f"{day[:4]}-{day[4:6]}-{day[6:]}",
            model=model,
            requests=found["requests"],
            tokens_in=found["in"],
            tokens_cached=found["cached"],
            tokens_out=found["out"],
            failed=found["failed"],
            cancelled=found["cancelled"],
            wait_p50_ms=quantile(waits, 0.5),
            wait_p99_ms=quantile(waits, 0.99),
        )


def _waits(counts: Iterable[tuple[str, int]]) -> Iterator[tuple[int, int]]:
    for what, count in counts:
        bucket = what.removeprefix(_WAIT)
        if bucket != what and bucket.isdecimal() and len(bucket) < 16:
            yield int(bucket), count
