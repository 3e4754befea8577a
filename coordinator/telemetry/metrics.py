"""The coordinator's metrics as Prometheus reads them (docs/metrics.md).

Its counts come from memory. The state of the yard is read from Redis at each scrape, by the thread
that answers it, over a connection of its own: the dispatch loop is not involved. Only the leader
reports the state of the yard, so that a sum over all coordinators is right.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import redis

from coordinator.roster import Roster, RosterMember
from coordinator.telemetry.counts import CoordinatorCounts
from coordinator.telemetry.tenant_series import TENANT_METRICS, TenantSeries
from tokenyard.broker.connection import batch_connection, connected, open_connection
from tokenyard.protocol.errors import SettingsError, TokenyardError
from tokenyard.protocol.keys import COUNTED, LINE_STATES, PRIORITY_CLASSES, Keys, Yard
from tokenyard.protocol.leader_reports import YardDemand, read_demand
from tokenyard.protocol.streams import whole
from tokenyard.protocol.worker_info import WORKER_STATES
from tokenyard.telemetry.metrics import REQUESTS, RETRIES, Metric, histograms, numbers, summary
from tokenyard.telemetry.queues import depths_of, queue_depths, read_batch_service, read_oldest_ms

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

log = logging.getLogger("tokenyard.coordinator.metrics")

#: Longest wait of a scrape for Redis; Prometheus itself waits 10 s by default.
PATIENCE_S: Final = 5.0

LEADER = Metric(
    "tokenyard_leader", "gauge", (), "1 on the coordinator that leads, 0 on one that stands by."
)
REDIS_UP = Metric(
    "tokenyard_redis_up", "gauge", (), "1 while Redis answers; else what is read there is left out."
)
REJECTED = Metric(
    "tokenyard_requests_rejected_total",
    "counter",
    ("reason",),
    "Requests that were refused: they are not valid, come too late or under another's id, or there"
    " is no room or no model for them.",
)
REDELIVERIES = Metric(
    "tokenyard_redeliveries_total",
    "counter",
    (),
    "Requests that were taken back from workers that were lost or have crashed.",
)
DEAD = Metric("tokenyard_dead_total", "counter", ("reason",), "Dead letters written.")
BAD = Metric(
    "tokenyard_bad_values_total",
    "counter",
    ("place",),
    "Values that were removed because they cannot be read, by the key that they were in.",
)
SWAPS = Metric(
    "tokenyard_model_swaps_total", "counter", (), "Models that controllers were told to load."
)
QUEUE_WAIT = Metric(
    "tokenyard_queue_wait_seconds",
    "histogram",
    ("priority",),
    "Time of a request in its intake, until it was given to a worker.",
)
ASSIGN = Metric(
    "tokenyard_assign_seconds",
    "histogram",
    (),
    "Time of the call that gives a batch of requests to workers.",
)
PREFIX_MATCH = Metric(
    "tokenyard_route_prefix_match_ratio",
    "summary",
    (),
    "Part of a prompt that is believed to be in the cache of the worker that gets it, from 0 to 1;"
    " counted by policies that look for prefixes.",
)
DEPTH = Metric("tokenyard_queue_depth", "gauge", ("queue", "priority"), "Requests waiting.")
MODEL_REQUESTS = Metric(
    "tokenyard_model_requests",
    "gauge",
    ("model", "state"),
    "Requests for a model that wait (`waiting`) or are on its workers' lanes (`running`); those"
    " that the leader has not read yet have no model.",
)
WORKERS_WANTED = Metric(
    "tokenyard_workers_wanted",
    "gauge",
    ("model",),
    "Workers that these requests need; never fewer than are busy or pinned.",
)
TOKENS = Metric(
    "tokenyard_queue_tokens",
    "gauge",
    ("queue",),
    "Prompt tokens waiting, as far as they came by `submit`, all intakes together.",
)
OLDEST = Metric(
    "tokenyard_queue_oldest_age_seconds",
    "gauge",
    ("queue",),
    "How long the first request of a class has waited, those of tenants included; 0 where there is"
    " none. Of the tenants in line the first and the last 16 are looked at.",
)
PENDING = Metric("tokenyard_pending", "gauge", ("worker",), "Entries on a worker's lane.")
WORKER_UP = Metric("tokenyard_worker_up", "gauge", ("worker",), "1 while a worker has its lease.")
LEASE_AGE = Metric(
    "tokenyard_worker_lease_age_seconds",
    "gauge",
    ("worker",),
    "Time since a worker renewed its lease.",
)
WORKER_STATE = Metric(
    "tokenyard_worker_state",
    "gauge",
    ("worker", "state"),
    "1 for the state that a worker is in, 0 for the others.",
)
BATCH_LINES = Metric(
    "tokenyard_batch_lines_total",
    "counter",
    ("state",),
    "Lines of batch jobs that have their answer; the leader counts what the jobs tell.",
)
BATCH_JOBS = Metric(
    "tokenyard_batch_jobs_waiting",
    "gauge",
    (),
    "Batch jobs at RQ that could run now. Left out where the coordinator may not read RQ's keys.",
)
BATCH_WORKERS = Metric(
    "tokenyard_batch_workers", "gauge", (), "Workers that run batch jobs. Left out likewise."
)
MEMORY = Metric(
    "tokenyard_redis_memory_ratio",
    "gauge",
    (),
    "Memory that Redis uses, as a part of what it may use.",
)
METRICS: Final = (
    *(LEADER, REDIS_UP, REQUESTS, REJECTED, RETRIES, REDELIVERIES, DEAD, BAD, SWAPS, BATCH_LINES),
    *(QUEUE_WAIT, ASSIGN, PREFIX_MATCH, DEPTH, MODEL_REQUESTS, WORKERS_WANTED),
    *(TOKENS, OLDEST, *TENANT_METRICS),
    *(PENDING, WORKER_UP, LEASE_AGE, WORKER_STATE, BATCH_JOBS, BATCH_WORKERS, MEMORY),
)


class CoordinatorMetrics:
    """Collects them; see `tokenyard.telemetry.metrics.Collector`."""

    def __init__(
        self, counts: CoordinatorCounts, redis_url: str, keys: Keys, term: Callable[[], str]
    ) -> None:
        """``term`` returns the token of this coordinator's term; "" while it stands by."""
        self._counts = counts
        self._url = redis_url
        self._keys = keys
        self._term = term
        self._tenants = TenantSeries()
        self._taken: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._lock = threading.Lock()  # concurrent scrapes must not take the same counts

    def scale(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What waits and runs, and how many workers that needs, of one ``model`` or of all.

        Raises `TokenyardError` where that is not known: zero would be taken for no demand.
        """
        with connected(self._url, timeout_s=PATIENCE_S, retries=0) as connection:
            return read_demand(Yard(connection, self._keys)).scale(query.get("model"))

    def collect(self) -> Iterable[Family]:
        """All metrics as they are now."""
        with self._lock:
            token = self._term()
            yard, is_up = [], True
            try:
                with open_connection(self._url, timeout_s=PATIENCE_S, retries=0) as connection:
                    if token:
                        self._take_counts(connection)
                        yard = list(self._yard(connection, token))
                    else:
                        connection.ping()
            except redis.RedisError as error:
                log.warning("the metrics of the yard are left out: %s", error)
                is_up = False
            yield numbers(LEADER, {(): bool(token)})
            yield numbers(REDIS_UP, {(): is_up})
            yield from self._own()
            yield from yard

    def _take_counts(self, connection: redis.Redis) -> None:
        """Take over the counts of scripts that clients call, each count once among all leaders."""
        tally = self._keys.tally
        values: list[bytes | None] = connection.hmget(tally, COUNTED)  # type: ignore[assignment]
        for name, value in zip(COUNTED, values, strict=True):
            count = whole(value)
            if count > 0:
                # A server without memory refuses this; then the next scrape takes it.
                connection.hincrby(tally, name, -count)
                self._taken[name] += count

    def _own(self) -> Iterator[Family]:
        counts, taken = self._counts, self._taken
        results, rejected = counts.results.copy(), counts.rejected.copy()
        for name in PRIORITY_CLASSES:
            results["", name, "cancelled"] += taken[f"count:cancelled:{name}"]
        for reason in ("QUEUE_FULL", "DEADLINE_EXCEEDED", "ID_REUSED", "QUOTA_EXCEEDED"):
            rejected[reason] += taken[f"count:{reason}"]
        back = counts.taken_back.copy()
        yield numbers(REQUESTS, results)
        yield numbers(REJECTED, _by_one(rejected))
        yield numbers(RETRIES, _by_one(back))
        yield numbers(REDELIVERIES, {(): back["lost"] + back["crashed"]})
        yield numbers(DEAD, _by_one(counts.dead.copy()))
        yield numbers(BAD, _by_one(counts.bad.copy()))
        yield numbers(SWAPS, {(): counts.swaps})
        yield numbers(BATCH_LINES, {(name,): taken[f"count:lines:{name}"] for name in LINE_STATES})
        yield histograms(QUEUE_WAIT, {(name,): one for name, one in counts.queue_wait.items()})
        yield histograms(ASSIGN, {(): counts.assign})
        yield summary(PREFIX_MATCH, counts.prefix_match)

    def _yard(self, connection: redis.Redis, token: str) -> Iterator[Family]:
        """The state of the yard."""
        keys = self._keys
        yard = Yard(connection, keys, self._url)
        pipeline = connection.pipeline(transaction=False)
        pipeline.hget(keys.tally, "queued_tokens")
        pipeline.info("memory")
        queue_depths(pipeline, keys)
        queued, memory, *answers = pipeline.execute()
        depths = depths_of(answers)
        roster = Roster(yard, has_log=False)
        roster.refresh()
        now_ms = roster.broker_time.now_ms
        yield numbers(DEPTH, {(name, name): depth for name, depth in depths.items()})
        with contextlib.suppress(TokenyardError):
            yield from _demand(read_demand(yard))
        tokens = max(0, whole(queued)) if any(depths.values()) else 0
        yield numbers(TOKENS, {("all",): tokens})
        oldest = read_oldest_ms(yard, now_ms)
        yield numbers(OLDEST, {(name,): age_ms / 1000 for name, age_ms in oldest.items()})
        loads = sum(member.load for member in roster.members.values())
        models = {model for model, *_ in self._counts.results.copy()}
        yield from self._tenants.read(
            yard, token, models, waiting=sum(depths.values()), running=loads
        )
        yield from _workers(roster.members, now_ms)
        with contextlib.suppress(redis.RedisError, SettingsError):
            batches = read_batch_service(batch_connection(yard), keys.yard)
            yield numbers(BATCH_JOBS, {(): batches.waiting})
            yield numbers(BATCH_WORKERS, {(): batches.workers})
        yield numbers(MEMORY, {(): _memory_ratio(memory)})


def _demand(demand: YardDemand) -> Iterator[Family]:
    requests = {}
    for model, one in demand.models.items():
        requests[model, "waiting"], requests[model, "running"] = one.waiting, one.running
    yield numbers(MODEL_REQUESTS, requests)
    yield numbers(WORKERS_WANTED, {(m,): one.workers for m, one in demand.models.items()})


def _by_one(counter: Mapping[str, int]) -> dict[tuple[str], int]:
    return {(name,): count for name, count in counter.items()}


def _workers(members: Mapping[str, RosterMember], now_ms: float) -> Iterator[Family]:
    """By worker name; the entries of a lost incarnation count with its successor's."""
    pending: dict[tuple[str, ...], float] = {}
    up: dict[tuple[str, ...], float] = {}
    age: dict[tuple[str, ...], float] = {}
    state: dict[tuple[str, ...], float] = {}
    # Those with a lease last, so that they overwrite the others.
    for member in sorted(members.values(), key=lambda one: one.lease_ms):
        name, info, has_lease = (member.info.name,), member.info, member.lease_ms > now_ms
        pending[name] = pending.get(name, 0) + member.load
        up[name] = has_lease
        if info.lease_ms and member.lease_ms > 0:
            age[name] = max(0.0, now_ms - (member.lease_ms - info.lease_ms)) / 1000
        for one in WORKER_STATES:
            state[info.name, one] = has_lease and one == info.state
    yield numbers(PENDING, pending)
    yield numbers(WORKER_UP, up)
    yield numbers(LEASE_AGE, age)
    yield numbers(WORKER_STATE, state)


def _memory_ratio(memory: Mapping[str, Any]) -> float:
    """Used part of `maxmemory`, or of the host's memory where that is not set."""
    most = int(memory.get("maxmemory") or memory.get("total_system_memory") or 0)
    return int(memory["used_memory"]) / most if most else 0.0
