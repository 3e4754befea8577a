"""Checks of the broker, and of what lies there that is no part of a yard's snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.broker.check import OLDEST, compatible_version, server_name
from tokenyard.client.options import Durability
from tokenyard.doctor.evidence import Evidence, Finding, fault, ok, unknown, warning
from tokenyard.protocol.texts import byte_size, counted

Check = Callable[[Evidence], Iterator[Finding]]
#: What INFO says, by field.
Info = Mapping[str, Any]

#: Shares of a resource from which on it is scarce, or critical.
_SCARCE: Final = 0.8
_CRITICAL: Final = 0.95
#: Seconds between two renewals of a lease, with a margin.
_LEAST_IDLE_S: Final = 30
_SKEW_MS: Final = 1000.0
_RECENT_S: Final = 3600.0
_MANY_KINDS: Final = 4
_RIGHTS: Final = "deploy/users.acl has users with the rights that each program needs"


def check_server(evidence: Evidence) -> Iterator[Finding]:
    """What becomes of accepted requests; `glance` suffices for it."""
    info = evidence.info
    if info is None:
        why = evidence.unseen.get("INFO", "")
        for name in ("version", "eviction", "persistence"):
            yield unknown(name, f"INFO is refused: {why}")
        return
    yield _version(info)
    yield _eviction(info)
    yield from _persistence(info, evidence.config)
    yield _replication(info)
    yield _connections(info)


def _version(info: Info) -> Finding:
    """Whether the server is new enough."""
    server = server_name(info)
    if compatible_version(info) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return fault("version", server, f"Use Redis {oldest} or newer, or Valkey.")
    return ok("version", server)


def _eviction(info: Info) -> Finding:
    """Whether the server may evict accepted requests."""
    policy, evicted = _word(info, "maxmemory_policy", "noeviction"), _number(info, "evicted_keys")
    todo = "CONFIG SET maxmemory-policy noeviction, and the same in the server's file."
    if evicted:
        found = f"{evicted:,} keys were evicted under {policy}"
        return fault("eviction", found, f"Requests may be lost. {todo}")
    if policy != "noeviction":
        found = f"maxmemory-policy is {policy}: without memory the server deletes accepted requests"
        return fault("eviction", found, todo)
    return ok("eviction", "maxmemory-policy noeviction")


def _persistence(info: Info, config: Mapping[str, str] | None) -> Iterator[Finding]:
    """Whether accepted requests survive a restart."""
    if not _number(info, "aof_enabled"):
        todo = "CONFIG SET appendonly yes, and the same in the server's file."
        yield fault("persistence", "appendonly is off: a restart loses requests", todo)
        return
    for name, what in (
        ("aof_last_write_status", "the last write of the append-only file"),
        ("aof_last_bgrewrite_status", "the last rewrite of the append-only file"),
        ("rdb_last_bgsave_status", "the last snapshot"),
    ):
        if _word(info, name, "ok") != "ok":
            todo = "See the server's log: a full disk, or no memory for its fork."
            yield fault("persistence", f"{what} failed", todo)
    yield _fsync((config or {}).get("appendfsync"))


def _fsync(how: str | None) -> Finding:
    if how is None:
        return unknown(
            "persistence", "appendonly yes; without CONFIG, appendfsync cannot be checked"
        )
    if how == "no":
        todo = "CONFIG SET appendfsync everysec, or always."
        return warning("persistence", "appendfsync no: a crash of the host loses requests", todo)
    risk = "" if how == "always" else ": a power failure loses up to the last second"
    return ok("persistence", f"appendonly yes, appendfsync {how}{risk}")


def check_memory(evidence: Evidence) -> Iterator[Finding]:
    """Used memory, and the kinds of keys that use most."""
    info = evidence.info
    if info is not None:
        yield _memory_of(info)
    sample = evidence.sample
    if sample is None:
        why = evidence.unseen.get("SCAN and MEMORY USAGE", "")
        yield unknown("keys", f"the keys of the yard cannot be counted: {why}")
        return
    heaviest = sorted(sample.kinds.items(), key=lambda item: -item[1].bytes)[:_MANY_KINDS]
    listed = ", ".join(
        f"{name} {kind.count:,} ({byte_size(kind.bytes)})" for name, kind in heaviest
    )
    whole = "" if sample.is_whole else " (of those scanned)"
    yield ok("keys", f"{listed or 'none'}{whole}")


def _memory_of(info: Info) -> Finding:
    used, most = _number(info, "used_memory"), _number(info, "maxmemory")
    if not most:
        todo = "CONFIG SET maxmemory, to less than the host has: its fork needs memory as well."
        return warning("memory", f"{byte_size(used)} used, maxmemory is not set", todo)
    found = f"{byte_size(used)} of {byte_size(most)} used ({used / most:.0%})"
    if used > _SCARCE * most:
        todo = "Raise maxmemory, or lower max_num_queued_reqs or the clients' result_ttl."
        say = fault if used > _CRITICAL * most else warning
        return say("memory", found, todo)
    return ok("memory", found)


def check_disk(evidence: Evidence) -> Iterator[Finding]:
    """Whether the append-only file has room, if the server is on this host."""
    disk = evidence.disk
    if disk is None:
        yield unknown("disk", "the server's disk cannot be checked from here")
        return
    part = 1 - disk.free_bytes / max(1, disk.total_bytes)
    found = f"{byte_size(disk.free_bytes)} free in {disk.folder}"
    need = 2 * _number(evidence.info or {}, "used_memory")
    if disk.free_bytes < need or part > _CRITICAL:
        yield warning("disk", found, "Free some: a rewrite of the append-only file needs it.")
    else:
        yield ok("disk", found)


def _replication(info: Info) -> Finding:
    """Whether this is a master, and whether its replicas are online."""
    if _is_replica(info):
        todo = "Give the URL of its master, or one with Sentinels."
        return fault("replication", "this is a replica, which takes no writes", todo)
    count, online = _number(info, "connected_slaves"), _online_replicas(info)
    if online < count:
        found = f"{count - online} of {count} replicas are not online"
        return warning("replication", found, "See their logs.")
    return ok("replication", f"master, {count} replicas")


def _is_replica(info: Info) -> bool:
    return _word(info, "role", "master") != "master"


def _online_replicas(info: Info) -> int:
    states = (info.get(f"slave{number}") for number in range(_number(info, "connected_slaves")))
    return sum(isinstance(one, dict) and one.get("state") == "online" for one in states)


def check_access(evidence: Evidence) -> Iterator[Finding]:
    """Whether the server needs a password, and recent refusals of its ACL."""
    me = f"we are user {evidence.user}"
    if evidence.snapshot is None and not _is_replica(evidence.info or {}):
        found = f"{me}, who may not read the yard: {evidence.unseen.get('the yard', '')}"
        yield fault("access", found, f"Use the user `admin`: {_RIGHTS}.")
    is_without_password = evidence.user == "default" and not evidence.has_password
    is_open = is_without_password if evidence.default_is_open is None else evidence.default_is_open
    if evidence.default_is_open is None and not is_open:
        yield unknown("access", f"{me}; without ACL GETUSER, others cannot be checked")
    elif is_open and _is_reachable(evidence):
        found = "the user `default` needs no password, and the server is reachable"
        yield warning("access", found, f"Set a password, or disable the user: {_RIGHTS}.")
    else:
        yield ok("access", f"{me}{', on loopback' if is_open else ''}")
    for refusal in evidence.refusals or ():
        if refusal["age-seconds"] <= _RECENT_S:
            what = f"{refusal['reason']} {refusal['object']}, {refusal['count']} times"
            found = f"user {refusal['username']} was refused {what}"
            yield warning("access", found, f"Compare its rights: {_RIGHTS}.")


def _is_reachable(evidence: Evidence) -> bool:
    """Whether other hosts can reach the server."""
    if not evidence.is_local:
        return True
    config = evidence.config
    if config is None or config.get("protected-mode") == "yes":
        return False
    bound = {word.removeprefix("-") for word in config.get("bind", "").split()}
    return not bound or bool(bound - {"127.0.0.1", "::1"})


def check_time_outs(evidence: Evidence) -> Iterator[Finding]:
    """The server's time-outs, compared with those of the programs."""
    config = evidence.config
    if config is None:
        why = evidence.unseen.get("CONFIG", "")
        yield unknown("time-outs", f"CONFIG is refused, as managed servers do: {why}")
        return
    idle_s = int(config.get("timeout", "0") or 0)
    alive_s = int(config.get("tcp-keepalive", "0") or 0)
    if 0 < idle_s < _LEAST_IDLE_S:
        found = f"timeout {idle_s}: closes connections between two renewals of a lease"
        yield warning("time-outs", found, f"CONFIG SET timeout 0, or at least {_LEAST_IDLE_S}.")
    elif not alive_s:
        found = "tcp-keepalive 0: connections of lost hosts stay forever"
        yield warning("time-outs", found, "CONFIG SET tcp-keepalive 300.")
    else:
        # Blocked reads (BLOCK 1000) are exempt from `timeout`.
        yield ok("time-outs", f"timeout {idle_s}, tcp-keepalive {alive_s}")


def _connections(info: Info) -> Finding:
    """Whether the server accepts more connections."""
    now, most = _number(info, "connected_clients"), _number(info, "maxclients")
    refused = _number(info, "rejected_connections")
    found = f"{now} of {most} connections"
    if refused:
        found = f"{found}, {refused} refused since the server started"
        return warning("connections", found, "Raise maxclients, and the limit of open files.")
    if most and now > _SCARCE * most:
        return warning("connections", found, "Raise maxclients.")
    return ok("connections", found)


def check_clock(evidence: Evidence) -> Iterator[Finding]:
    """The server's clock, which deadlines use, compared with ours."""
    skew = abs(evidence.clock_ms) - evidence.round_trip_ms / 2
    ahead = "ahead of" if evidence.clock_ms > 0 else "behind"
    found = f"the server is {abs(evidence.clock_ms):,.0f} ms {ahead} this host"
    if skew > _SKEW_MS:
        yield warning("clock", found, "Set both clocks by NTP.")
    else:
        yield ok("clock", found)


def check_batches(evidence: Evidence) -> Iterator[Finding]:
    """Batch jobs without a worker; nothing where no batch was ever submitted."""
    batches = evidence.batches
    if batches is None:
        why = evidence.unseen.get("RQ's keys", "their Redis does not answer")
        yield unknown("batches", f"RQ's keys cannot be seen: {why}")
    elif batches.is_missing:
        found = f"{counted(batches.waiting, 'job')} could run, and no batch worker is there"
        yield fault("batches", found, "Start `tokenyard batch worker`.")
    elif batches.workers:
        yield ok("batches", f"{counted(batches.workers, 'worker')}, {batches.waiting} waiting")


def check_groups(evidence: Evidence) -> Iterator[Finding]:
    """Warn of every consumer group: Tokenyard creates none, and nobody would acknowledge for it."""
    if evidence.groups is None:
        why = evidence.unseen.get("XINFO GROUPS", "")
        yield unknown("groups", f"the consumer groups cannot be seen: {why}")
        return
    for stream, name, pending in evidence.groups:
        found = f"{stream.rpartition('}:')[2]} has a group {name!r} not ours, {pending} pending"
        yield warning("groups", found, f"XGROUP DESTROY {stream} {name}")
    if not evidence.groups:
        yield ok("groups", "none, as none is needed")


def _word(info: Info, name: str, default: str = "") -> str:
    return str(info.get(name, default))


def _number(info: Info, name: str) -> int:
    value = info.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


BROKER_CHECKS: Final[tuple[Check, ...]] = (
    check_server,
    check_memory,
    check_disk,
    check_access,
    check_time_outs,
    check_clock,
    check_batches,
    check_groups,
)


# Which of the durabilities that a client may ask for this server can confirm.

#: The first server with WAITAOF.
_OLDEST: Final = (7, 2)


@dataclass(frozen=True, slots=True)
class Grade:
    """One durability."""

    level: Durability
    is_possible: bool
    why: str  # what it is worth here, or why the server cannot confirm it
    is_certain: bool = True  # whether what it confirms is always so


def durability_grades(evidence: Evidence) -> Iterator[Grade]:
    """Each durability; none where INFO is refused."""
    if evidence.info is None:
        return
    yield Grade("memory", True, "the server has it in its memory")
    yield _disk(evidence.info, evidence.config)
    online = _online_replicas(evidence.info)
    why = f"replicas online: {online}" if online else "no replica is online"
    yield Grade("replicated", bool(online), why)


def _disk(info: Info, config: Mapping[str, str] | None) -> Grade:
    if not info.get("aof_enabled"):
        return Grade("disk", False, "appendonly is off")
    if compatible_version(info) < _OLDEST and "valkey_version" not in info:
        return Grade("disk", False, "the server has no WAITAOF: that needs Redis 7.2 or Valkey")
    how = (config or {}).get("appendfsync")
    if how == "always":
        return Grade("disk", True, "appendfsync always: it is on the disk")
    if how == "no":
        return Grade("disk", False, "appendfsync no: the server does not tell")
    told = f"appendfsync {how}" if how else "appendfsync cannot be seen"
    why = f"{told}: some servers confirm before it is on the disk; certain under always"
    return Grade("disk", True, why, is_certain=False)
