"""What the doctor says of a yard and its tenants: pure functions, without a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.snapshots import make_letter, make_view_worker
from tests.unit.doctor.evidence import HANDSHAKE, KEYS, found, looked, sound
from tokenyard.doctor.evidence import Evidence, Finding, KeySample, LostEntries, Verdict
from tokenyard.protocol.control import DesiredState, DesiredStates
from tokenyard.protocol.leader_reports import LAST, LAST_FOUND, Pass
from tokenyard.protocol.worker_info import HostInfo, ModelInfo
from tokenyard.yard.snapshot import WorkerView
from tokenyard.yard.tenants import TenantView

ASLEEP = make_view_worker("w.1", state="warm", model="")
GPU = HostInfo(name="gpu", models=[ModelInfo(name="adder")])
BROKEN = HostInfo(name="gpu", models=[ModelInfo(name="big", fault="no file", faults=3)])
NOT_LOADED = "big could not be loaded on gpu, 3 times: no file"
STRAY = KeySample({}, {"w.1": 1, "old.7": 3, "older.2": 0}, is_whole=True)
LETTER = make_letter("5-0", "it killed its worker")
ENDED = msgspec.json.encode(Pass(at_ms=20_000, took_s=0.1, ledgers=30, ended=7)).decode()
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
        ("entries", "warning", "anon/4 and 2 more", "", sound(lost=LOST)),
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


def test_groups_are_not_ours() -> None:
    groups = [
        (KEYS.intake("low"), "coordinator", 3),
        (KEYS.events, "somebody", 5),
    ]

    old, somebody = found(sound(groups=groups), "groups")

    assert old.found == "intake:low has a group 'coordinator' not ours, 3 pending"
    assert somebody.todo == f"XGROUP DESTROY {KEYS.events} somebody"


def test_a_tenant_that_hits_a_limit_all_the_time_is_named() -> None:
    def tenants(count: int, at_ms: int) -> list[Finding]:
        one = TenantView(
            name="ann",
            refused={"tokens_per_day": 9_999},
            refused_lately={"tokens_per_day": count},
            refused_ms={"tokens_per_day": at_ms},
        )
        return found(sound(tenants=[one]), "tenants")

    [finding] = tenants(1234, 57_000)
    assert finding.verdict == "warning"
    assert "ann: tokens_per_day has refused 1,234 requests in this hour" in finding.found
    assert "the last 3.0 s ago" in finding.found
    assert "tokenyard tenants set ann --tokens-per-day" in finding.todo
    assert "wait as the refusal says" in finding.todo
    # Seldom, or long ago, is in order.
    assert [one.verdict for one in tenants(3, 57_000)] == ["ok"]
    assert [one.verdict for one in tenants(1234, 57_000 - 3_600_000)] == ["ok"]


@pytest.mark.parametrize(
    ("one", "todo"),
    [
        (TenantView(name="ann", is_readable=False), "tenants set ann ..."),
        # Where waiting does not help, the remedy is another request.
        (
            TenantView(name="ann", refused_lately={"models": 10}, refused_ms={"models": 57_000}),
            "ann --models ...), or let its clients ask for what it allows.",
        ),
    ],
)
def test_a_tenant_in_trouble(one: TenantView, todo: str) -> None:
    [finding] = found(sound(tenants=[one]), "tenants")

    assert finding.verdict == "warning"
    assert finding.todo.endswith(todo)


def test_many_tenants_at_their_limits_are_counted() -> None:
    many = [TenantView(name=f"t{at}", is_readable=False) for at in range(50)]
    findings = found(sound(tenants=many), "tenants")
    assert len(findings) == 6
    assert "50 such problems" in findings[-1].found


def test_tenants_that_our_user_may_not_see_are_unknown() -> None:
    evidence = sound(tenants=None, unseen={"tenants": "NOPERM"})
    [finding] = found(evidence, "tenants")
    assert (finding.verdict, "NOPERM" in finding.found) == ("unknown", True)
