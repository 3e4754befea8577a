"""A chaos run that broke or measured nothing must fail."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from benchmarks.chaos.check import History, gather
from benchmarks.chaos.faults import FAST, FIRST, SLOW, Kind, Pace, Part, Planned, schedule
from benchmarks.chaos.history import (
    Accepted,
    Asked,
    Event,
    Fault,
    Joined,
    Missed,
    Moved,
    Published,
    Resumed,
)
from benchmarks.chaos.targets import NOBODY, find_workers
from benchmarks.chaos.verdict import shortcomings
from tokenyard.protocol.worker_info import WorkerInfo, encode_worker

C, ID = "client-0", "1-1"
PLANNED = [Planned(float(at), ("worker", "kill"), 0.5, 1.0) for at in range(20)]


def stream() -> list[Event]:
    """A stream over HTTP that a worker's death cuts, and a gateway's; another one continues."""
    return [
        Joined("host-0-0.1", 4242),
        Asked(100.0, C, ID, 6, stream=True, tokens=[1]),
        Accepted(100.1, C, ID),
        Moved(100.1, C, ID, "lane:host-0-0.1"),
        Published(100.3, C, ID, "delta", 0, [1, 2]),
        Moved(100.6, C, ID, "intake:retry"),
        Moved(100.7, C, ID, "lane:host-1-0.2"),
        Published(100.8, C, ID, "delta", 2, [3, 4]),
        Resumed(100.9, C, ID, 0),
    ]


def faults(kinds: Sequence[Kind] = FIRST) -> list[Event]:
    return [Fault(100.5, " ".join(kind), "host-0", [4242]) for kind in kinds]


def told(
    *events: Event, seconds: float = 60, parts: Sequence[Part] = (), tenants: Sequence[str] = ()
) -> str:
    return "; ".join(shortcomings(PLANNED, gather(events), seconds, parts, tenants))


def test_a_full_run_passes() -> None:
    assert told(*stream(), *faults()) == ""


@pytest.mark.parametrize("kind", FIRST)
def test_a_missing_fault_fails_the_run(kind: Kind) -> None:
    rest = [one for one in FIRST if one != kind]
    parts = {part for part, _ in FIRST} - {kind[0]}

    assert told(*stream(), *faults(rest)) == f"no {' '.join(kind)} hit anything"
    # unless it was not due
    assert told(*stream(), *faults(rest), parts=sorted(parts)) == ""


def test_a_short_run_kills_at_least_a_worker_and_a_gateway() -> None:
    assert told(*stream(), *faults(FIRST[:2]), seconds=6) == ""
    assert told(*stream(), *faults(FIRST[1:]), seconds=6) == "no worker kill hit anything"
    assert told(*stream(), *faults(FIRST[:1]), seconds=6) == "no gateway kill hit anything"
    assert told(*stream(), *faults(FIRST[:1]), seconds=6, parts=["worker"]) == ""


def test_a_run_without_a_recovery_fails() -> None:
    idle = [event for event in stream() if not isinstance(event, Moved)]

    assert told(*idle, *faults()).startswith("no recovery was measured")


def test_a_run_in_which_no_stream_was_continued_fails() -> None:
    whole = [event for event in stream() if not isinstance(event, Resumed)]

    assert told(*whole, *faults()).startswith("no stream over HTTP was continued")


def test_a_run_in_which_no_kill_hit_a_tenant_fails() -> None:
    def of(tenant: str) -> list[Event]:
        return [
            msgspec.structs.replace(event, tenant=tenant) if isinstance(event, Asked) else event
            for event in stream()
        ]

    assert told(*of("acme"), *faults(), tenants=["acme"]) == ""
    none = "no killed worker had a request of a tenant"
    assert told(*of(""), *faults(), tenants=["acme"]) == none
    # over before the kill
    result = Published(100.4, C, ID, "result", 2, [1, 2], "cancelled")
    assert none in told(*of("acme"), *faults(), result, tenants=["acme"])
    assert told(*of(""), *faults()) == ""


@pytest.mark.parametrize(("tenant", "key"), [("acme", "key-0"), ("acme", ""), ("", "key-0")])
def test_a_run_in_which_gateways_had_no_tenants_request_fails(tenant: str, key: str) -> None:
    asked = Asked(100.1, C, "http-0", 4, stream=True, tenant=tenant, key=key)
    ended = Published(100.2, C, "http-0", "result", 0, [1], "completed")
    parts = sorted({part for part, _ in FIRST})

    why = told(*stream(), asked, ended, *faults(), parts=parts, tenants=["acme"])

    assert ("no tenant's request came over HTTP" in why) == (not (tenant and key))


def test_faults_without_a_target_fail_the_run() -> None:
    misses = [Missed(100.5, "worker kill")] * 2

    assert told(*stream(), *faults(), *misses) == ""
    missed = told(*stream(), *faults(), *misses, Missed(100.5, "broker stop"))
    assert missed == "3 of 20 faults had no target (2 worker kill, 1 broker stop)"


def test_an_empty_run_fails() -> None:
    assert "no request was accepted" in told(*faults())
    assert "none of 20 planned faults hit anything" in told(*stream())
    assert "none of 0 planned" in "; ".join(shortcomings([], History(), 1))


@pytest.mark.parametrize("pace", [FAST, SLOW])
@pytest.mark.parametrize("seed", range(2))
def test_every_schedule_has_the_required_faults(seed: int, pace: Pace) -> None:
    planned = schedule(seed, 60, pace)

    assert set(FIRST) <= {fault.kind for fault in planned}
    assert planned[0].kind == ("worker", "kill")


@pytest.mark.parametrize("pace", [FAST, SLOW])
@pytest.mark.parametrize("parts", [[], ["gateway"]])
def test_one_of_two_gateways_has_time_to_start(parts: list[Part], pace: Pace) -> None:
    for seed in range(20):
        hits = [one.at_s for one in schedule(seed, 60, pace, parts) if one.kind[0] == "gateway"]
        assert all(after - before >= pace.gateway_s for before, after in pairwise(hits))


def test_workers_are_found_by_the_process_ids_of_the_roster() -> None:
    """Given two hosts, a dead process, and a process id that now belongs to a stranger."""
    roster = {
        b"host-1-0.4": info("host-1-0", 44),
        b"host-0-0.3": info("host-0-0", 33),
        b"host-0-1.5": info("host-0-1", 55),
        b"else": b"no entry",
    }
    hosts = {33: "host-0", 44: "host-1"}

    found = find_workers(roster, lambda pid: hosts.get(pid, NOBODY))

    assert [(one.host, one.worker, one.pid, one.state) for one in found] == [
        ("host-0", "host-0-0.3", 33, "ready"),
        ("host-1", "host-1-0.4", 44, "ready"),
    ]


def info(name: str, pid: int) -> bytes:
    return encode_worker(WorkerInfo(name=name, state="ready", pid=pid))
