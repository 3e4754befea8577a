"""Tenants with something waiting, as `info`, `top`, `explain`, `requests` and `empty` show them."""

from __future__ import annotations

import json
import re
import time

import msgspec
import pytest

from tests.integration.operating import Command
from tests.support.builders import make_request, worker_json
from tests.support.yard import LONG_MS, PlayedYard, QueuedRequest
from tokenyard.ops.tenants import apply_changes, changes_to
from tokenyard.protocol.keys import intake_name
from tokenyard.protocol.tenants import TenantSettings
from tokenyard.scripts.answers import Charge, Dispatched
from tokenyard.yard.history import SnapshotHistory, read_snapshot
from tokenyard.yard.line import read_line, shares_between
from tokenyard.yard.listing import Query, find_owners, list_requests
from tokenyard.yard.tenants import read_tenants, read_windows
from tokenyard.yard.timeline import read_timeline
from tokenyard.yard.usage import read_usage


def submit(yard: PlayedYard, tenant: str, count: int = 1, name: str = "") -> list[QueuedRequest]:
    """Requests of a tenant, under a client of its name."""
    requests = [
        make_request(f"{name}{at}" if name else None, tenant=tenant, client=tenant or "anon")
        for at in range(count)
    ]
    accepted = yard.scripts.submit("normal", requests)
    intake = intake_name("normal", tenant)
    return [
        QueuedRequest(request, intake, one.sid.rpartition("/")[2])
        for request, one in zip(requests, accepted, strict=True)
    ]


def serve(
    yard: PlayedYard, worker: str, waiting: QueuedRequest, tokens: int, weight: float = 1.0
) -> None:
    """Dispatch a request, and end it with so many tokens."""
    charge = Charge(waiting.request.tenant, 100 / weight, 1 / weight, 2 / weight, "sim")
    move = msgspec.structs.replace(waiting.to(worker), charge=charge)
    assert yard.scripts.dispatch(yard.token, [move]) == [Dispatched.DISPATCHED]
    yard.finish(worker, yard.lane(worker)[-1], range(tokens))


def settle(yard: PlayedYard, **weights: float) -> None:
    wanted = {name: TenantSettings(weight=weight) for name, weight in weights.items()}
    assert apply_changes(yard, changes_to({}, wanted))


def test_a_yard_without_tenants_has_nobody_in_line(yard: PlayedYard, command: Command) -> None:
    yard.submit()
    line = read_line(yard)
    assert (line.tenants, line.waiting) == ((), 0)
    assert "enant" not in command("info").stdout


def test_info_shows_who_waits_with_the_share_that_each_should_have(
    yard: PlayedYard, command: Command
) -> None:
    settle(yard, ann=3)
    submit(yard, "ann", 5)
    submit(yard, "bob", 2)
    text = command("info").stdout
    assert "7 of these of tenants" in text
    assert re.search(r"ann +5 +0 +3 +75.0%", text)
    assert re.search(r"bob +2 +0 +1 +25.0%", text)
    line = json.loads(command("info", "--json").stdout)["line"]
    assert {one["name"]: one["wanted"] for one in line["tenants"]} == {"ann": 0.75, "bob": 0.25}
    assert "7 requests of tenants waiting" in command("top", "--once", "--interval", "0.1").stdout


def test_the_share_had_is_what_was_served_between_two_looks(yard: PlayedYard) -> None:
    # Given two tenants with the weights 1 and 3, and one that comes back after a rest
    settle(yard, ann=1, bob=3)
    worker = yard.worker()
    ann, bob = submit(yard, "ann", 5), submit(yard, "bob", 5)
    submit(yard, "cem", 1)
    history = SnapshotHistory()
    history.add(read_snapshot(yard))
    assert history.tenant_shares() == {}

    # If ann is served 20 tokens and bob 60,
    serve(yard, worker, ann[0], 10)
    serve(yard, worker, ann[1], 10)
    serve(yard, worker, bob[0], 60, weight=3)
    history.add(read_snapshot(yard))

    # I expect their shares of what both have had.
    shares = history.tenant_shares()
    assert shares == pytest.approx({"ann": 0.25, "bob": 0.75, "cem": 0})


def test_what_rest_has_added_is_nothing_that_a_tenant_has_had(yard: PlayedYard) -> None:
    worker = yard.worker()
    ann, _ = submit(yard, "ann", 3), submit(yard, "bob", 1)
    before = read_line(yard)
    serve(yard, worker, ann[0], 50)
    yard.connection.zadd(yard.keys.line, {"bob": 500})  # as if it had been served much
    yard.connection.zadd(yard.keys.service, {"bob": 500})
    yard.connection.zrem(yard.keys.line, "ann")
    # If ann comes back and is put beside bob,
    submit(yard, "ann", 1)
    now = read_line(yard)
    ann_now, ann_before = now.of("ann"), before.of("ann")
    assert ann_now
    assert ann_before
    assert ann_now.service == 500
    assert ann_now.had - ann_before.had < 200
    assert set(shares_between(before, now)) == {"ann", "bob"}


def test_explain_names_the_tenants_that_are_served_before_and_why(
    yard: PlayedYard, command: Command
) -> None:
    yard.scripts.register("w", LONG_MS, worker_json("w"))
    settle(yard, ann=1, bob=3)
    submit(yard, "ann", 2, "a")
    submit(yard, "bob", 1, "b")
    yard.connection.zadd(yard.keys.line, {"ann": 200, "bob": 100})
    timeline = read_timeline(yard, "ann", "a1")
    assert (timeline.tenant, timeline.before) == ("ann", ["bob"])
    text = " ".join(command("explain", "a1", "--client", "ann").stdout.split())
    assert "tenant ann has 2 waiting: 2 normal; served before it" in text
    assert (
        "served before it, as they have had less for their weight: bob; its share is 25.0%" in text
    )
    text = " ".join(command("explain", "b0", "--client", "bob").stdout.split())
    assert "it is the next of 2 tenants in line; its share is 75.0%" in text
    # A limit holds it, whatever its turn.
    yard.connection.hset(yard.keys.tenants, "bob", '{"max_running_requests":4}')
    yard.connection.hset(yard.keys.tenant("bob"), "running", 4)
    text = " ".join(command("explain", "b0", "--client", "bob").stdout.split())
    assert "4 of its requests run, and max_running_requests is 4" in text
    # Requests of no tenant are told with whom they share.
    yard.submit(make_request("plain"))
    text = " ".join(command("explain", "plain").stdout.split())
    assert "requests of no tenant share with 2 tenants" in text


def test_a_tenants_requests_are_listed_found_and_emptied(
    yard: PlayedYard, command: Command
) -> None:
    submit(yard, "ann", 3, "a")
    submit(yard, "bob", 2, "b")
    yard.submit(make_request("plain"))
    query = Query(states=frozenset({"waiting"}))
    found = list_requests(yard, query).requests
    assert {one.id for one in found} == {"a0", "a1", "a2", "b0", "b1", "plain"}
    yard.connection.delete(yard.keys.ledger("bob", "b1"))
    assert find_owners(yard, "b1").clients == ["bob"]
    done = json.loads(command("empty", "--class", "high", "--yes", "--json").stdout)
    assert done["cancelled"] == {"high": 0}
    done = json.loads(command("empty", "--yes", "--json").stdout)
    assert done["cancelled"]["normal"] == 6
    assert read_line(yard).tenants == ()


def test_usage_is_what_the_results_have(yard: PlayedYard, command: Command) -> None:
    worker = yard.worker()
    for waiting in submit(yard, "ann", 3):
        serve(yard, worker, waiting, 7)
    (row,) = read_usage(yard, ["ann"], days=1)
    assert (row.model, row.requests, row.tokens_out, row.failed) == ("sim", 3, 21, 0)
    assert row.wait_p99_ms is not None
    assert "3 requests" in command("tenants", "usage").stdout
    (one,) = read_tenants(yard)
    assert (one.name, one.waiting, one.running) == ("ann", 0, 0)


def looked_at(command: Command) -> str:
    """What the doctor says of tenants."""
    findings = [json.loads(line) for line in command("doctor", "--json").stdout.splitlines()]
    (finding,) = (one for one in findings if one["name"] == "tenants")
    return f"{finding['found']}\n{finding['todo']}"


def test_show_has_what_counts_for_a_limit_and_what_it_has_refused(
    yard: PlayedYard, command: Command
) -> None:
    # Given a tenant with room for the 3 tokens and 16 more of four requests in a minute
    command("tenants", "set", "ann", "--tokens-per-minute", "80", "--tokens-per-day", "1000")
    submit(yard, "ann", 15)
    (one,) = read_tenants(yard)
    assert one.waiting == 4
    assert one.refused == one.refused_lately == {"tokens_per_minute": 11}
    [windows] = read_windows(yard, ["ann"])
    assert windows == {
        "tokens_per_minute": 76,
        "tokens_per_day": 76,
    }
    text = command("tenants", "show", "ann").stdout
    assert re.search(r"tokens_per_minute +80, 76 used", text)
    assert re.search(r"tokens_per_day +1,000, 76 used", text)
    lately = "11 by tokens_per_minute, 11 in the last hour or two, the last at 2"
    assert lately in " ".join(text.split())
    shown = json.loads(command("tenants", "show", "ann", "--json").stdout)
    assert shown["refused"] == shown["refused_lately"] == {"tokens_per_minute": 11}
    # The doctor names it,
    assert "ann: tokens_per_minute has refused 11 requests" in looked_at(command)
    # but not where all but the last of these were long ago.
    counts = yard.keys.tenant("ann")
    for name in ("refused:tokens_per_minute:0", "refused:tokens_per_minute:1"):
        number, _, _ = (yard.connection.hget(counts, name) or b"0").partition(b" ")
        yard.connection.hset(counts, name, b"%b 1" % number)
    assert "none at its limits" in looked_at(command)


def test_the_doctor_names_a_tenant_that_is_held_all_the_time(
    yard: PlayedYard, command: Command
) -> None:
    # Given a tenant that runs as many as it may, with others that have just come
    command("tenants", "set", "ann", "--max-running-requests", "2")
    submit(yard, "ann", 7)
    yard.connection.hset(yard.keys.tenant("ann"), "running", 2)
    assert "none at its limits" in looked_at(command)

    # If one of these has waited for long,
    old_ms = int(time.time() * 1000) - 3_600_000
    yard.connection.xadd(yard.keys.intake("low:ann"), {"id": "q"}, id=f"{old_ms}-0")

    # I expect it to be named, though nothing was refused, and not while it may run more.
    said = looked_at(command)
    assert "ann: max_running_requests holds 7 requests, the oldest for 1 h: 2 run" in said
    assert "tokenyard tenants set ann --max-running-requests" in said
    yard.connection.hset(yard.keys.tenant("ann"), "running", 1)
    assert "none at its limits" in looked_at(command)
