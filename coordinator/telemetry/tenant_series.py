"""The metrics of tenants, of a bounded number of them, read at each scrape."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoPermissionError

from tokenyard import clock
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Yard, is_tenant
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import FAILED, WAIT, day_before, field_of
from tokenyard.telemetry.metrics import Metric, bucketed, numbers

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

log = logging.getLogger("tokenyard.coordinator.tenant_usage")

# Which tenants have series of their own, without I/O: few at a time, and seldom others.
#
# Each tenant that ever had a series costs whoever stores them, so the choice follows what tenants
# had over hours, and not who happens to be ahead in the line.

#: Tenants with series of their own.
MOST_TENANTS: Final = 20
#: How often one of them may give way to another one, in seconds.
REVIEW_S: Final = 3600.0
#: And only to one that had so many times as much in that time.
FACTOR: Final = 2.0


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What a tenant has at one moment."""

    had: float = 0.0  # weighted tokens by weight, ever; without what rest has added
    waiting: int = 0  # requests
    running: int = 0
    is_there: bool = True  # False: the yard knows nothing of it


class TenantChoice:
    """The choice of one coordinator; it outlasts its terms."""

    def __init__(self) -> None:
        self.names: list[str] = []  # the chosen ones
        self.compared: frozenset[str] = frozenset()  # that the next review needs to see
        self._had: Mapping[str, float] = {}  # of those compared, at the last review
        self._due_s = -math.inf

    def is_open(self, now_s: float) -> bool:
        """Whether it is to be told of tenants that might be chosen."""
        return len(self.names) < MOST_TENANTS or now_s >= self._due_s

    def update(
        self, found: Mapping[str, TenantFigures], candidates: Collection[str], now_s: float
    ) -> None:
        """Choose again; ``found`` are the chosen, the candidates and those to be compared.

        Who is not there any more gives up its place at once, and a free place is given at once, to
        whoever has had most. ``now_s`` is any steady clock.
        """
        there = {name: one for name, one in found.items() if one.is_there}
        self.names = [name for name in self.names if name in there]
        others = sorted(there.keys() - set(self.names), key=lambda name: (-there[name].had, name))
        room = MOST_TENANTS - len(self.names)
        self.names += others[:room]
        if now_s >= self._due_s:
            self._exchange(there, others[room:])
            self.compared = frozenset(there.keys() & {*candidates, *self.names})
            self._had = {name: there[name].had for name in self.compared}
            self._due_s = now_s + REVIEW_S

    def _exchange(self, there: Mapping[str, TenantFigures], others: Collection[str]) -> None:
        """Let the one who had least since the last review give way to the one who had most."""
        lately = {name: there[name].had - had for name, had in self._had.items() if name in there}

        def rank(name: str) -> tuple[float, str]:
            return lately[name], name

        least = min(lately.keys() & set(self.names), key=rank, default="")
        most = max(lately.keys() & set(others), key=rank, default="")
        if least and most and lately[most] > FACTOR * max(0.0, lately[least]):
            self.names[self.names.index(least)] = most


# What tenants used while this coordinator led, from ``usage:<tenant>``, for counters.
#
# Those hashes count by day and are pruned, so their sums may fall. Here only what was added between
# two looks counts: a counter grows as long as the process lives, and what another coordinator has
# seen is not counted a second time.

#: What counts as expired, and for scripts as failed.
EXPIRED: Final = FAILED + Code.DEADLINE_EXCEEDED
#: Buckets of waits, in ms: 24 days and less.
WAITS_MS: Final = tuple(2**exponent for exponent in range(32))
#: The counts that are read of each day and model.
WHATS: Final = (
    *("requests", "in", "cached", "out", "failed", EXPIRED, "cancelled"),
    *(f"{WAIT}{bucket}" for bucket in WAITS_MS),
)


class _Tenant:
    """What is known of one."""

    def __init__(self) -> None:
        self.counts = Counter[str](dict.fromkeys(WHATS, 0))
        self.seen: dict[bytes, int] = {}  # by field, at the last look
        self.models: set[str] = set()  # that were looked at before, in this term


class TenantUsageCounts:
    """The counts of some tenants, from the first look at each of them."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._token = ""
        self._day = ""
        self._is_allowed = True

    def read(
        self, yard: Yard, token: str, tenants: Sequence[str], models: Collection[str]
    ) -> Mapping[str, Counter[str]]:
        """Look at these tenants, and forget others; their counts by name and what is counted.

        ``token`` is that of the term: what was added between two terms is another leader's.
        ``models`` are all models that the yard knows, by which usage is counted.
        """
        run: Any = yard.connection  # redis-py's replies have no types
        seconds, _ = run.time()
        today = day_before(seconds, 0)
        # Behind midnight once more what was added before it.
        days = sorted({self._day or today, today})
        fields = [(model, field_of(day, model, what), what)
                  for day in days for model in models for what in WHATS]  # fmt: skip
        if token != self._token:
            self._is_allowed = True
            for one in self._tenants.values():
                one.models.clear()
        self._tenants = {name: self._tenants.get(name) or _Tenant() for name in tenants}
        pipeline = run.pipeline(transaction=False)
        for name in tenants:
            pipeline.hmget(yard.keys.usage(name), [field for _, field, _ in fields])
        answers = pipeline.execute(raise_on_error=False) if self._is_allowed else ()
        for one, values in zip(self._tenants.values(), answers, strict=False):
            if isinstance(values, NoPermissionError):
                self._is_allowed = False
            elif isinstance(values, list):  # else it is no hash
                _add(one, fields, values)
                one.models.update(models)
        if not self._is_allowed and answers:
            log.warning("this term has no usage of tenants: the user of Redis may not read it")
        self._token, self._day = token, today
        return {name: one.counts.copy() for name, one in self._tenants.items()}


def _add(
    one: _Tenant, fields: Iterable[tuple[str, bytes, str]], values: Iterable[bytes | None]
) -> None:
    """Count what was added since the last look; of a model that is new, from now on."""
    seen = {}
    for (model, field, what), value in zip(fields, values, strict=True):
        if value is None:
            continue
        seen[field] = count = max(0, whole(value))
        if model in one.models:
            one.counts[what] += max(0, count - one.seen.get(field, 0))
    one.seen = seen


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

    def __init__(self) -> None:
        self._choice = TenantChoice()
        self._usage = TenantUsageCounts()

    def read(
        self, yard: Yard, token: str, models: Collection[str], *, waiting: int, running: int
    ) -> Iterator[Family]:
        """Their metrics in the term of this token, of the requests that wait and run in all."""
        figures = self._choose(yard)
        for metric, total, found in (
            (TENANT_WAITING, waiting, {(name,): one.waiting for name, one in figures.items()}),
            (TENANT_RUNNING, running, {(name,): one.running for name, one in figures.items()}),
        ):
            yield numbers(metric, {**found, (OTHER,): max(0, total - sum(found.values()))})
        yield from _used(self._usage.read(yard, token, list(figures), models))

    def _choose(self, yard: Yard) -> Mapping[str, TenantFigures]:
        """The chosen ones."""
        choice, now_s = self._choice, clock.monotonic()
        names, candidates = set(choice.names), set[str]()
        if choice.is_open(now_s):
            candidates = _candidates(yard)
            names |= candidates | choice.compared
        found = _figures(yard, names)
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
