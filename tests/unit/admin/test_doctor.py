"""What the doctor says of what it has seen: pure functions, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.snapshots import make_snapshot, make_view_worker
from tokenyard.admin.dead_letters import DeadLetter
from tokenyard.admin.snapshot import WorkerView
from tokenyard.admin.tenants import TenantView
from tokenyard.doctor import (
    Evidence,
    Finding,
    Verdict,
    check_server,
    diagnose,
    durability_grades,
)
from tokenyard.doctor.evidence import AclRefusal, ConsumerGroup, Disk, LostEntries
from tokenyard.doctor.sampling import KeySample, Kind
from tokenyard.protocol.control import DesiredState, DesiredStates
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.reconciliation import LAST, LAST_FOUND, Pass, encode_pass
from tokenyard.protocol.wire import WIRE_VERSION
from tokenyard.protocol.worker_info import HostInfo, ModelInfo

KEYS = Keys("main")
MIB = 2**20
INFO: dict[str, Any] = {
    "redis_version": "7.2.4",
    "maxmemory_policy": "noeviction",
    "maxmemory": 1000 * MIB,
    "used_memory": 100 * MIB,
    "evicted_keys": 0,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "role": "master",
    "connected_slaves": 0,
    "connected_clients": 10,
    "maxclients": 10_000,
    "rejected_connections": 0,
}
CONFIG = {
    "appendfsync": "everysec",
    "bind": "127.0.0.1",
    "protected-mode": "yes",
    "tcp-keepalive": "300",
    "timeout": "0",
}
SAMPLE = KeySample({"request": Kind(3, 3000)}, {"w.1": 0}, is_whole=True)
PASS = encode_pass(Pass(at_ms=50_000, took_s=1.5, ledgers=1234, ended=0)).decode()
HANDSHAKE = {"protocol": str(WIRE_VERSION), LAST: PASS}


def sound(**changes: Any) -> Evidence:
    """What is seen of a yard where all is well, but for some changes."""
    snapshot = make_snapshot(60_000, [make_view_worker("w.1")], handshake=HANDSHAKE)
    values: dict[str, Any] = {
        "info": INFO,
        "config": CONFIG,
        "user": "admin",
        "default_is_open": False,
        "refusals": [],
        "snapshot": snapshot,
        "groups": [ConsumerGroup(KEYS.intake("low"), "coordinator", 2, {"leader": 2})],
        "tenants": [TenantView(name="ann", refused={"max_tokens": 9}, refused_ms={})],
        "sample": SAMPLE,
        "disk": Disk("/data", 900 * MIB, 1000 * MIB),
    }
    return Evidence(**(values | changes))


def found(evidence: Evidence, name: str) -> list[Finding]:
    return [finding for finding in diagnose(evidence) if finding.name == name]


def looked(*workers: WorkerView, **fields: Any) -> Evidence:
    seen = workers or (make_view_worker("w.1"),)
    return sound(snapshot=make_snapshot(60_000, seen, **({"handshake": HANDSHAKE} | fields)))


def test_healthy_yard_has_no_remedies() -> None:
    findings = list(diagnose(sound()))

    assert {finding.verdict for finding in findings} == {"ok"}, findings
    assert len(findings) >= 19
    assert not any(finding.todo for finding in findings)


@pytest.mark.parametrize(
    ("name", "verdict", "words", "changes"),
    [
        ("version", "fault", "6.2.1", {"redis_version": "6.2.1"}),
        ("eviction", "fault", "allkeys-lru", {"maxmemory_policy": "allkeys-lru"}),
        ("eviction", "fault", "7 keys were evicted", {"evicted_keys": 7}),
        ("persistence", "fault", "appendonly is off", {"aof_enabled": 0}),
        ("persistence", "fault", "last write", {"aof_last_write_status": "err"}),
        ("persistence", "fault", "last rewrite", {"aof_last_bgrewrite_status": "err"}),
        ("persistence", "fault", "last snapshot", {"rdb_last_bgsave_status": "err"}),
        ("memory", "warning", "maxmemory is not set", {"maxmemory": 0}),
        ("memory", "warning", "85%", {"used_memory": 850 * MIB}),
        ("memory", "fault", "97%", {"used_memory": 970 * MIB}),
        ("replication", "fault", "replica", {"role": "slave"}),
        (
            "replication",
            "warning",
            "1 of 1",
            {"connected_slaves": 1, "slave0": {"state": "wait_bgsave"}},
        ),
        ("connections", "warning", "refused", {"rejected_connections": 3}),
        ("connections", "warning", "9500 of 10000", {"connected_clients": 9500}),
        ("disk", "warning", "900.0 MiB free", {"used_memory": 600 * MIB}),
    ],
)
def test_findings_from_server_info(
    name: str, verdict: Verdict, words: str, changes: dict[str, Any]
) -> None:
    findings = found(sound(info=INFO | changes), name)

    [finding] = [one for one in findings if one.verdict == verdict]
    assert words in finding.found
    assert finding.todo


@pytest.mark.parametrize(
    ("name", "words", "changes"),
    [
        ("persistence", "appendfsync no", {"appendfsync": "no"}),
        ("time-outs", "timeout 5", {"timeout": "5"}),
        ("time-outs", "tcp-keepalive 0", {"tcp-keepalive": "0"}),
    ],
)
def test_findings_from_server_settings(name: str, words: str, changes: dict[str, str]) -> None:
    [finding] = found(sound(config=CONFIG | changes), name)

    assert finding.verdict == "warning"
    assert words in finding.found


def test_valkey_is_called_by_its_name() -> None:
    [finding] = found(sound(info=INFO | {"valkey_version": "9.1.2"}), "version")

    assert finding.found == "Valkey 9.1.2"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"default_is_open": True}, "ok"),  # on loopback
        ({"default_is_open": True, "host": "broker"}, "warning"),
        ({"default_is_open": True, "config": CONFIG | {"bind": "*", "protected-mode": "no"}},
         "warning"),
        ({"default_is_open": True, "config": CONFIG | {"bind": "*"}}, "ok"),
        ({"default_is_open": None, "host": "broker", "user": "default"}, "warning"),
        ({"default_is_open": None, "user": "default"}, "ok"),
        ({"default_is_open": None, "host": "broker", "user": "default", "has_password": True},
         "unknown"),
        ({"default_is_open": None, "host": "broker", "user": "admin"}, "unknown"),
        ({"refusals": [AclRefusal("worker", "command xadd", 12, 60.0)]}, "warning"),
        ({"refusals": [AclRefusal("worker", "command xadd", 12, 99_999.0)]}, "ok"),
        ({"snapshot": None}, "fault"),
    ],
)  # fmt: skip
def test_access_of_the_default_user(changes: dict[str, Any], verdict: Verdict) -> None:
    verdicts = {finding.verdict for finding in found(sound(**changes), "access")}

    assert verdicts - {"ok"} == {verdict} - {"ok"}


@pytest.mark.parametrize(
    ("clock_ms", "round_trip_ms", "verdict"),
    [
        (-1500.0, 2.0, "warning"),
        (1500.0, 2.0, "warning"),
        (900.0, 0.0, "ok"),
        (1500.0, 1200.0, "ok"),
    ],
)
def test_the_servers_clock(clock_ms: float, round_trip_ms: float, verdict: Verdict) -> None:
    [finding] = found(sound(clock_ms=clock_ms, round_trip_ms=round_trip_ms), "clock")

    assert finding.verdict == verdict


def test_refused_checks_are_unknown() -> None:
    evidence = Evidence(snapshot=sound().snapshot, unseen={"CONFIG": "unknown command"})

    findings = list(diagnose(evidence))

    assert {one.verdict for one in findings} == {"ok", "unknown"}
    unseen = {one.name for one in findings if one.verdict == "unknown"}
    assert unseen >= {"version", "eviction", "persistence", "keys", "disk", "time-outs", "groups"}


# The yard


ASLEEP = make_view_worker("w.1", state="warm", model="")
GPU = HostInfo(name="gpu", models=[ModelInfo(name="adder")])
BROKEN = HostInfo(name="gpu", models=[ModelInfo(name="big", fault="no file", faults=3)])
NOT_LOADED = "big could not be loaded on gpu, 3 times: no file"
STRAY = KeySample({}, {"w.1": 1, "old.7": 3, "older.2": 0}, is_whole=True)
LETTER = DeadLetter("5-0", 5000, "it killed its worker", "low/1-0", "ann", "q7", "", {})
ENDED = encode_pass(Pass(at_ms=20_000, took_s=0.1, ledgers=30, ended=7)).decode()
LOST = LostEntries([f"anon/{at}" for at in range(7)], 100)


@pytest.mark.parametrize(
    ("name", "verdict", "words", "todo", "evidence"),
    [
        ("coordinator", "fault", "no coordinator leads", "", looked(leader=None)),
        ("coordinator", "fault", "", "", looked(handshake={})),
        ("coordinator", "fault", "", "", looked(handshake={"protocol": "99"})),
        ("workers", "fault", "", "", looked(ASLEEP)),
        # If its host may load what is asked for, it is well until something waits.
        ("workers", "ok", "", "", looked(ASLEEP, hosts=[GPU])),
        ("workers", "warning", "", "", looked(ASLEEP, hosts=[GPU], waiting=3)),
        ("models", "fault", NOT_LOADED, "", looked(hosts=[BROKEN])),
        ("models", "warning", NOT_LOADED, "", looked(hosts=[BROKEN], models={"big": 1})),
        ("lanes", "fault", ": old.7 (3)", "", sound(sample=STRAY)),
        ("dead letters", "warning", "1, the last: it killed", "", looked(dead=1, letters=[LETTER])),
        ("entries", "ok", "checked 1,234 ledgers in 1.5 s, 10 s ago", "", sound()),
        (
            "entries",
            "warning",
            "7 requests ended as ENTRY_LOST, 40 s ago",
            "XTRIM",
            looked(handshake=HANDSHAKE | {LAST_FOUND: ENDED}),
        ),
        *(
            ("entries", "unknown", "SCAN", "", looked(handshake={**HANDSHAKE, LAST: odd}))
            for odd in ("", "[]", "garbage", '{"at_ms":"x"}')
        ),
        (
            "entries",
            "warning",
            "7 of 100 requests have lost their entry: anon/0, ",
            "",
            sound(lost=LOST),
        ),
        ("entries", "warning", "anon/4, ...", "", sound(lost=LOST)),
        (
            "entries",
            "fault",
            "",
            "start one",
            sound(snapshot=looked(handshake={}, leader=None).snapshot, lost=LOST),
        ),
    ],
)
def test_findings_from_the_yard(
    name: str, verdict: Verdict, words: str, todo: str, evidence: Evidence
) -> None:
    [finding] = found(evidence, name)

    assert finding.verdict == verdict
    assert words in finding.found
    assert todo in finding.todo


def test_workers_in_trouble() -> None:
    evidence = looked(
        make_view_worker("a.1"),
        make_view_worker("b.2", state="failed", last_error="ended by SIGSEGV"),
        make_view_worker("c.3", last_error="no memory", last_error_ms=50_000),
        WorkerView("d.4", "unreadable", 0, 20_000),
    )

    _, failed, recent, unreadable = found(evidence, "workers")

    assert (failed.verdict, recent.verdict, unreadable.verdict) == ("fault", "warning", "warning")
    assert "ended by SIGSEGV" in failed.found
    assert "c, 10 s ago: no memory" in recent.found


def test_a_worker_from_the_future() -> None:
    [finding] = found(
        looked(make_view_worker("a.1", since_ms=63_000, host="gpu-1")), "clocks of workers"
    )

    assert finding.found == "the clock of gpu-1 is 3.0 s ahead of the server's"


def test_versions_that_differ() -> None:
    evidence = looked(
        make_view_worker("a.1", engine_version="0.26"),
        make_view_worker("b.2", engine_version="0.32"),
        make_view_worker("c.3", engine_version="0.32", model="other"),
    )

    [finding] = found(evidence, "versions")

    assert finding.verdict == "warning"
    assert "0.26" in finding.found
    assert "other" not in finding.found


@pytest.mark.parametrize(
    ("scope", "run_state", "todo"),
    [
        ("all", "PAUSED", "tokenyard unpause"),
        ("model:adder", "PAUSED", "tokenyard unpause --model adder"),
        ("worker:w-1", "SUSPENDED", "tokenyard resume and then tokenyard unpause --worker w-1"),
    ],
)
def test_a_paused_scope(scope: str, run_state: Any, todo: str) -> None:
    desired_state = DesiredState(run_state=run_state, by="kim@north", why="its driver")
    [finding] = found(
        looked(desired_states=DesiredStates({scope: desired_state})), "desired_states"
    )

    assert finding.verdict == "warning"
    assert finding.found == f"{scope} is {run_state} by kim@north: its driver"
    assert finding.todo.endswith(todo)


@pytest.mark.parametrize("leads", [True, False])
def test_requests_of_a_worker_that_is_gone(leads: bool) -> None:
    gone = WorkerView("w.1", "lost", 4, 0)
    evidence = looked(gone) if leads else looked(gone, leader=None)

    [finding] = found(evidence, "leases")

    assert finding.verdict == "warning"
    assert ("start one" in finding.todo) != leads


def test_groups_and_consumers_that_are_not_ours() -> None:
    groups = [
        ConsumerGroup(KEYS.intake("low"), "coordinator", 3, {"leader": 1, "old": 2}),
        ConsumerGroup(KEYS.events, "somebody", 5),
    ]

    old, somebody = found(sound(groups=groups), "groups")

    assert "2 entries of intake:low" in old.found
    assert somebody.todo == f"XGROUP DESTROY {KEYS.events} somebody"


# Tenants


def test_a_tenant_that_hits_a_limit_all_the_time_is_named() -> None:
    def tenants(count: int, at_ms: int) -> list[Finding]:
        one = TenantView(
            name="ann", refused={"tokens_per_day": count}, refused_ms={"tokens_per_day": at_ms}
        )
        return found(looked_at_tenants(one), "tenants")

    [finding] = tenants(1234, 57_000)
    assert finding.verdict == "warning"
    assert "ann: tokens_per_day has refused 1,234 requests, the last 3.0 s ago" in finding.found
    assert "tokenyard tenants set ann --tokens-per-day" in finding.todo
    assert "wait as the refusal says" in finding.todo
    # Seldom, or long ago, is in order.
    assert [one.verdict for one in tenants(3, 57_000)] == ["ok"]
    assert [one.verdict for one in tenants(1234, 57_000 - 3_600_000)] == ["ok"]


def test_settings_that_cannot_be_read_are_named() -> None:
    [finding] = found(looked_at_tenants(TenantView(name="ann", is_readable=False)), "tenants")
    assert (finding.verdict, "tenants set ann" in finding.todo) == ("warning", True)


def test_where_waiting_does_not_help_the_remedy_is_another_request() -> None:
    one = TenantView(name="ann", refused={"models": 10}, refused_ms={"models": 57_000})
    [finding] = found(looked_at_tenants(one), "tenants")
    assert finding.todo.endswith("ann --models ...), or let its clients ask for what it allows.")


def test_many_tenants_at_their_limits_are_counted() -> None:
    many = [TenantView(name=f"t{at}", is_readable=False) for at in range(50)]
    findings = found(looked_at_tenants(*many), "tenants")
    assert len(findings) == 6
    assert "50 such problems" in findings[-1].found


def test_tenants_that_our_user_may_not_see_are_unknown() -> None:
    evidence = sound(tenants=None, unseen={"tenants": "NOPERM"})
    [finding] = found(evidence, "tenants")
    assert (finding.verdict, "NOPERM" in finding.found) == ("unknown", True)


def looked_at_tenants(*tenants: TenantView) -> Evidence:
    snapshot = make_snapshot(60_000, (make_view_worker("w.1"),), handshake=HANDSHAKE)
    return sound(snapshot=snapshot, tenants=tenants)


@pytest.mark.parametrize(
    ("info", "config", "expected"),
    [
        ({}, {}, ("yes", "unsure", "no")),
        ({}, {"appendfsync": "always"}, ("yes", "yes", "no")),
        ({}, {"appendfsync": "no"}, ("yes", "no", "no")),
        ({"aof_enabled": 0}, {}, ("yes", "no", "no")),
        ({"redis_version": "7.0.15"}, {}, ("yes", "no", "no")),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, {}, ("yes", "unsure", "no")),
        ({"connected_slaves": 1, "slave0": {"state": "online"}}, {}, ("yes", "unsure", "yes")),
        ({"connected_slaves": 1, "slave0": {"state": "wait_bgsave"}}, {}, ("yes", "unsure", "no")),
    ],
)
def test_which_durability_the_server_can_confirm(
    info: dict[str, Any], config: dict[str, str], expected: tuple[str, ...]
) -> None:
    evidence = Evidence(info=INFO | info, config=CONFIG | config)

    grades = list(durability_grades(evidence))

    assert [one.level for one in grades] == ["memory", "disk", "replicated"]
    told = [
        "no" if not one.is_possible else "yes" if one.is_certain else "unsure" for one in grades
    ]
    assert tuple(told) == expected
    assert list(durability_grades(Evidence())) == []


def test_a_glance_suffices_for_the_checks_of_the_server() -> None:
    bad = Evidence(info=INFO | {"aof_enabled": 0, "evicted_keys": 3}, config=CONFIG)

    found = {one.name: one.verdict for one in check_server(bad)}
    assert found["persistence"] == found["eviction"] == "fault"
    assert found["version"] == "ok"
    assert {one.name for one in check_server(sound())} >= {"replication", "connections"}
