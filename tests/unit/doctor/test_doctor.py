"""What the doctor says of a server: pure functions, without one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.doctor.evidence import CONFIG, INFO, MIB, found, sound
from tokenyard.doctor import diagnose
from tokenyard.doctor.broker_checks import check_server, durability_grades
from tokenyard.doctor.evidence import Evidence, Verdict

REFUSAL = {"username": "worker", "reason": "command", "object": "xadd", "count": 12}


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
        ("disk", "warning", "900 MiB free", {"used_memory": 600 * MIB}),
        ("persistence", "warning", "appendfsync no", {"appendfsync": "no"}),
        ("time-outs", "warning", "timeout 5", {"timeout": "5"}),
        ("time-outs", "warning", "tcp-keepalive 0", {"tcp-keepalive": "0"}),
    ],
)
def test_findings_from_the_server(
    name: str, verdict: Verdict, words: str, changes: dict[str, Any]
) -> None:
    config = {option: value for option, value in changes.items() if option in CONFIG}
    findings = found(sound(info=INFO | changes, config=CONFIG | config), name)

    [finding] = [one for one in findings if one.verdict == verdict]
    assert words in finding.found
    assert finding.todo


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
        ({"refusals": [REFUSAL | {"age-seconds": 60.0}]}, "warning"),
        ({"refusals": [REFUSAL | {"age-seconds": 99_999.0}]}, "ok"),
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
