"""What the checks go by: read once, within limits, as far as broker and user allow.

And what they find.
"""

from __future__ import annotations

import heapq
import itertools
import shutil
import statistics
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import redis

from tokenyard import clock
from tokenyard.broker.connection import batch_connection
from tokenyard.broker.url import split_url
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.keys import INTAKE_CLASSES, Keys, Yard
from tokenyard.protocol.streams import unix_ms
from tokenyard.scripts import Scripts
from tokenyard.telemetry.queues import BatchService, read_ages_ms, read_batch_service
from tokenyard.yard.history import Snapshot, read_snapshot
from tokenyard.yard.tenants import TenantView, read_tenants

T = TypeVar("T")

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
#: Settings of the server that the checks use.
_SETTINGS: Final = ("appendfsync", "bind", "dir", "protected-mode", "tcp-keepalive", "timeout")
_REFUSALS: Final = 20
#: Queries that a user may be refused for good, whatever the state of the yard.
_BY_RIGHTS: Final = frozenset(
    {"INFO", "CONFIG", "ACL GETUSER", "ACL LOG", "RQ's keys", "SCAN and MEMORY USAGE"}
)
#: Keys in one step of the search for lost entries, and most steps.
_STEP: Final = 1000
_MAX_STEPS: Final = 50
#: Tenants at `max_running_requests` whose oldest request is looked at.
_MOST_HELD: Final = 50


#: A consumer group: its stream, name, and number of pending entries.
ConsumerGroup = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that the server writes to."""

    folder: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LostEntries:
    """Requests whose entry is not where their ledger says."""

    names: Sequence[str]  # <client>/<id>
    ledgers: int  # searched


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence; None for what could not be read, with the reason in ``unseen``."""

    host: str = "127.0.0.1"
    info: Mapping[str, Any] | None = None  # INFO
    config: Mapping[str, str] | None = None
    user: str = "default"  # of our connection
    has_password: bool = False  # whether our URL has one
    default_is_open: bool | None = None  # whether `default` needs no password
    refusals: Sequence[Mapping[str, Any]] | None = None  # ACL LOG
    clock_ms: float = 0.0  # the server's clock minus ours
    round_trip_ms: float = 0.0  # twice the error of `clock_ms`
    snapshot: Snapshot | None = None
    groups: Sequence[ConsumerGroup] | None = None
    tenants: Sequence[TenantView] | None = None
    #: How long the oldest request waits of tenants that may run no more of them, of some by name.
    held_ms: Mapping[str, int] = field(default_factory=dict)
    sample: KeySample | None = None
    lost: LostEntries | None = None
    disk: Disk | None = None
    batches: BatchService | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> Mapping[str, str]:
        """What our user may not ask, with the server's answer."""
        return {what: why for what, why in self.unseen.items() if what in _BY_RIGHTS}

    @property
    def is_local(self) -> bool:
        """Whether the server is on this host."""
        return self.host in LOOPBACK or self.host.startswith("/")


class _Reader:
    """Runs queries, and records those that are refused."""

    def __init__(self, connection: redis.Redis, unseen: Mapping[str, str]) -> None:
        self.run: Any = connection  # redis-py's replies have no types
        self.unseen = dict(unseen)

    def __call__(self, what: str, ask: Callable[[], T]) -> T | None:
        """The reply; None if this user or this server does not allow the query."""
        if what in self.unseen:
            return None
        try:
            return ask()
        except (redis.exceptions.NoPermissionError, redis.exceptions.ResponseError) as refused:
            self.unseen[what] = str(refused)
            return None


def gather(yard: Yard, refused: Mapping[str, str] = types.MappingProxyType({})) -> Evidence:
    """Read broker and yard. Errors of redis-py pass, except for missing rights.

    What was refused before (`Evidence.refused`) is not asked for again: each refusal is an entry of
    the server's ACL LOG.
    """
    parts, read = split_url(yard.url), _Reader(yard.connection, refused)
    # On a Cluster, a command with a key leads to the node that has the yard.
    read("the yard", lambda: yard.connection.exists(yard.keys.leader))
    info = read("INFO", lambda: cast(dict[str, Any], read.run.info("everything")))
    config = read("CONFIG", lambda: read.run.config_get(*_SETTINGS))
    clock_ms, round_trip_ms = _clock(yard.connection)
    tenants = read("tenants", lambda: read_tenants(yard))
    held = read("tenants", lambda: _held(yard, tenants or ()))
    return Evidence(
        host=_host(yard.url),
        info=info,
        config=config,
        user=parts.user or "default",
        has_password=parts.has_password,
        default_is_open=read("ACL GETUSER", lambda: _is_open(read.run.acl_getuser("default"))),
        refusals=read("ACL LOG", lambda: read.run.acl_log(_REFUSALS)),
        clock_ms=clock_ms,
        round_trip_ms=round_trip_ms,
        snapshot=read("the yard", lambda: read_snapshot(yard)),
        groups=read("XINFO GROUPS", lambda: _groups(read.run, yard.keys)),
        tenants=tenants,
        held_ms=held or {},
        sample=read("SCAN and MEMORY USAGE", lambda: sample_keys(read.run, yard.keys)),
        lost=read("lost entries", lambda: _lost(Scripts(yard))),
        disk=_disk(yard.url, config),
        batches=read("RQ's keys", lambda: _batches(yard)),
        unseen=read.unseen,
    )


def glance(yard: Yard, known: Evidence | None) -> Evidence:
    """Read INFO alone, the rest as ``known``: enough for `tokenyard.doctor.check_server`."""
    known = known or Evidence()
    read = _Reader(yard.connection, known.refused)
    info = read("INFO", lambda: cast(dict[str, Any], read.run.info("everything")))
    return Evidence(host=_host(yard.url), info=info, config=known.config, unseen=read.unseen)


def _host(url: str) -> str:
    """The broker's host, the path of its socket, or "" if there are several."""
    parts = split_url(url)
    if parts.scheme == "unix":
        return parts.path
    (host, _), *others = parts.addresses
    return "" if others else host or "localhost"


def _clock(connection: redis.Redis) -> tuple[float, float]:
    """The server's clock minus ours, and the time of the round trip, both in ms."""
    connection.time()  # connects first; not PING, which a full disk refuses
    before, began = clock.wall(), clock.monotonic()
    seconds, micros = connection.time()
    took = clock.monotonic() - began
    return (seconds + micros / 1e6 - before - took / 2) * 1000, took * 1000


def _is_open(user: Mapping[str, Any] | None) -> bool:
    return {"on", "nopass"} <= {*(user or {}).get("flags", ())}


def _groups(run: Any, keys: Keys) -> list[ConsumerGroup]:
    streams = (*(keys.intake(name) for name in INTAKE_CLASSES), keys.events, keys.capacity)
    found = []
    for stream in streams:
        try:
            groups = run.xinfo_groups(stream)
        except redis.exceptions.ResponseError as error:
            if "no such key" not in str(error):
                raise
            continue
        for one in groups:
            name = one["name"].decode(errors="replace")
            found.append((stream, name, one["pending"]))
    return found


def _held(yard: Yard, tenants: Iterable[TenantView]) -> dict[str, int]:
    """Those that may run no more, with most waiting, and how long the oldest request has waited."""
    held = [one for one in tenants if one.is_held]
    names = [one.name for one in heapq.nlargest(_MOST_HELD, held, key=lambda one: one.waiting)]
    if not names:
        return {}
    ages = read_ages_ms(yard, names, unix_ms(yard.connection.time()))
    return {name: max(of_classes.values()) for name, of_classes in ages.items()}


def _lost(scripts: Scripts) -> LostEntries:
    names: dict[str, None] = {}  # SCAN may name a key more than once
    cursor = ledgers = 0
    for _ in range(_MAX_STEPS):
        step = scripts.astray(cursor, _STEP)
        cursor, ledgers = step.cursor, ledgers + step.ledgers
        # The leader watches those of a worker with a lease.
        found = [one for one in step.found if not one.may_run]
        names |= dict.fromkeys(f"{one.client}/{one.request_id}" for one in found)
        if not cursor:
            break
    return LostEntries(list(names), ledgers)


def _batches(yard: Yard) -> BatchService | None:
    """None while their Redis is away."""
    try:
        return read_batch_service(batch_connection(yard), yard.keys.yard)
    except SettingsError as error:
        raise redis.ResponseError(str(error)) from error
    except (redis.ConnectionError, redis.TimeoutError):
        return None


def _disk(url: str, config: Mapping[str, str] | None) -> Disk | None:
    """The server's disk, if it is on this host."""
    folder = (config or {}).get("dir", "")
    if _host(url) not in LOOPBACK or not folder or not Path(folder).is_dir():
        return None
    total, _used, free = shutil.disk_usage(folder)
    return Disk(folder, free, total)


# Counts the keys of a yard by kind, and samples their memory, within limits.

#: The scan ends after this time, or this many keys of any yard.
MOST_S: Final = 3.0
MOST_KEYS: Final = 200_000
#: Keys per kind whose memory is measured.
MAX_MEASURED: Final = 50
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Kind:
    """The keys of one kind."""

    count: int
    bytes: int  # estimated


@dataclass(frozen=True, slots=True)
class KeySample:
    """The keys of a yard."""

    kinds: Mapping[str, Kind]  # by the first word after the yard
    lanes: Mapping[str, int]  # entries of each lane, by worker
    is_whole: bool  # whether all keys of the server were scanned


def sample_keys(run: Any, keys: Keys) -> KeySample:
    """Scan the keys of a yard; ``run`` is a connection."""
    found, is_whole = _scan(run, f"tokenyard:{{{keys.yard}}}:")
    kinds = {}
    for kind, names in sorted(found.items()):
        measured = _each(run, "MEMORY USAGE", itertools.islice(names, MAX_MEASURED))
        average = statistics.mean([size for size in measured if size] or [0])
        kinds[kind] = Kind(len(names), round(average * len(names)))
    lanes = list(found.get("lane", ()))
    workers = (name.removeprefix(keys.lane("").encode()) for name in lanes)
    lengths = zip(workers, _each(run, "XLEN", lanes), strict=True)
    return KeySample(
        kinds, {worker.decode(errors="replace"): length for worker, length in lengths}, is_whole
    )


def _scan(run: Any, prefix: str) -> tuple[Mapping[str, set[bytes]], bool]:
    """Names of keys by kind, and whether these are all. Yard names need no escaping in MATCH."""
    found: dict[str, set[bytes]] = defaultdict(set)
    cursor = seen = 0
    until = clock.monotonic() + MOST_S
    while True:
        cursor, names = run.scan(cursor, match=prefix + "*", count=_PAGE)
        seen += _PAGE
        for name in names:
            kind = name.removeprefix(prefix.encode()).partition(b":")[0]
            found[kind.decode(errors="replace")].add(name)
        if not cursor or seen >= MOST_KEYS or clock.monotonic() >= until:
            return found, not cursor


def _each(run: Any, command: str, names: Iterable[bytes]) -> list[Any]:
    """The answers to a command about each of these keys."""
    pipeline = run.pipeline(transaction=False)
    for name in names:
        pipeline.execute_command(command, name)
    answers: list[Any] = pipeline.execute()
    return answers


# What a check finds.

#: ``unknown``: this broker or user does not allow the check.
Verdict = Literal["ok", "warning", "fault", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    name: str
    verdict: Verdict
    found: str
    todo: str = ""  # the remedy, if there is something to do


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, todo: str) -> Finding:
    """It works, but something should be done."""
    return Finding(name, "warning", found, todo)


def fault(name: str, found: str, todo: str) -> Finding:
    """Something does not work, or accepted requests can be lost."""
    return Finding(name, "fault", found, todo)


def unknown(name: str, found: str) -> Finding:
    """It cannot be checked."""
    return Finding(name, "unknown", found)
