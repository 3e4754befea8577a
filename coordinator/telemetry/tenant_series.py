"""The metrics of tenants, of a bounded number of them, read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import redis

from coordinator.telemetry.tenant_choice import MOST_TENANTS, TenantChoice, TenantFigures
from coordinator.telemetry.tenant_usage import EXPIRED, WAITS_MS, TenantUsageCounts
from tokenyard import clock
from tokenyard.protocol.keys import Keys, is_tenant
from tokenyard.protocol.streams import whole
from tokenyard.protocol.usage import WAIT
from tokenyard.protocol.yard import Yard
from tokenyard.telemetry.metrics import Metric, bucketed, numbers

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

#: The tenants that have no series of their own, and the requests of none: no tenant can be called
#: this (`is_tenant`).
OTHER: Final = "(other)"
#: Tenants that may be chosen: so many that have had most, and so many that are next in line.
CANDIDATES: Final = 64
#: Buckets of the histogram, in seconds, and their bounds in ms: the shortest waits are one bucket.
_LES: Final = (
    *((str(ms / 1000), ms) for ms in WAITS_MS if 16 <= ms <= 2**22),
    ("+Inf", WAITS_MS[-1]),
)

TENANT_WAITING = Metric(
    "tokenyard_tenant_waiting",
    "gauge",
    ("tenant",),
    f"Requests waiting, of {MOST_TENANTS} tenants; `{OTHER}` are the rest, also those without a"
    " tenant.",
)
TENANT_RUNNING = Metric(
    "tokenyard_tenant_running", "gauge", ("tenant",), "Requests on lanes, of the same tenants."
)
TENANT_REQUESTS = Metric(
    "tokenyard_tenant_requests_total",
    "counter",
    ("tenant", "outcome"),
    "Requests of the same tenants that have ended, without the rest.",
)
TENANT_TOKENS = Metric(
    "tokenyard_tenant_tokens_total",
    "counter",
    ("tenant", "direction"),
    "Tokens of the prompts and answers of these requests.",
)
TENANT_CACHED = Metric(
    "tokenyard_tenant_cached_tokens_total",
    "counter",
    ("tenant",),
    "Those of the tokens of prompts that were in a prefix cache.",
)
TENANT_WAIT = Metric(
    "tokenyard_tenant_wait_seconds",
    "histogram",
    ("tenant",),
    "Time of a request of these tenants until its first dispatch, in buckets of its own and without"
    " sum and count.",
)
TENANT_METRICS: Final = (
    *(TENANT_WAITING, TENANT_RUNNING),
    *(TENANT_REQUESTS, TENANT_TOKENS, TENANT_CACHED, TENANT_WAIT),
)


class TenantSeries:
    """Chooses the tenants of one coordinator's metrics, and reads what they have."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._choice = TenantChoice()
        self._usage = TenantUsageCounts()

    def read(
        self,
        connection: redis.Redis,
        token: str,
        models: Collection[str],
        *,
        waiting: int,
        running: int,
    ) -> Iterator[Family]:
        """Their metrics in the term of this token, of the requests that wait and run in all."""
        figures = self._choose(connection)
        for metric, total, found in (
            (TENANT_WAITING, waiting, {(name,): one.waiting for name, one in figures.items()}),
            (TENANT_RUNNING, running, {(name,): one.running for name, one in figures.items()}),
        ):
            yield numbers(metric, {**found, (OTHER,): max(0, total - sum(found.values()))})
        yield from _used(
            self._usage.read(Yard(connection, self._keys), token, list(figures), models)
        )

    def _choose(self, connection: redis.Redis) -> Mapping[str, TenantFigures]:
        """The chosen ones."""
        choice, now_s = self._choice, clock.monotonic()
        names, candidates = set(choice.names), set[str]()
        if choice.is_open(now_s):
            candidates = _candidates(Yard(connection, self._keys))
            names |= candidates | choice.compared
        found = _figures(Yard(connection, self._keys), names)
        choice.update(found, candidates, now_s)
        return {name: found[name] for name in choice.names}


def _candidates(yard: Yard) -> set[str]:
    pipeline: Any = yard.connection.pipeline(transaction=False)
    pipeline.zrevrange(yard.keys.service, 0, CANDIDATES - 1)
    pipeline.zrange(yard.keys.line, 0, CANDIDATES - 1)
    names = (raw.decode(errors="replace") for page in pipeline.execute() for raw in page)
    return set(filter(is_tenant, names))


def _figures(yard: Yard, names: Collection[str]) -> dict[str, TenantFigures]:
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for name in names:
        pipeline.zscore(yard.keys.service, name)
        pipeline.hmget(yard.keys.tenant(name), "waiting", "running", "lifted")
    found = pipeline.execute()
    figures = {}
    for name, score, counts in zip(names, found[::2], found[1::2], strict=True):
        waiting, running, lifted = (max(0, whole(one)) for one in counts)
        is_there = score is not None or waiting > 0 or running > 0
        figures[name] = TenantFigures((score or 0.0) - lifted, waiting, running, is_there)
    return figures


def _used(counts: Mapping[str, Counter[str]]) -> Iterator[Family]:
    """What each has used."""
    requests, tokens, waits = {}, {}, {}
    for name, one in counts.items():
        requests[name, "completed"] = one["requests"] - one["failed"] - one["cancelled"]
        requests[name, "failed"] = one["failed"] - one[EXPIRED]
        requests[name, "cancelled"] = one["cancelled"]
        requests[name, "expired"] = one[EXPIRED]
        tokens[name, "input"] = one["in"]
        tokens[name, "output"] = one["out"]
        waits[name,] = [
            (le, sum(one[f"{WAIT}{ms}"] for ms in WAITS_MS if ms <= most)) for le, most in _LES
        ]
    yield numbers(TENANT_REQUESTS, requests)
    yield numbers(TENANT_TOKENS, tokens)
    yield numbers(TENANT_CACHED, {(name,): one["cached"] for name, one in counts.items()})
    yield bucketed(TENANT_WAIT, waits)
