"""Requests that are found wherever they are, with work that is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from tests.support.builders import make_request, random_name, worker_json
from tests.support.counting import Counting
from tests.support.servers import limited_user
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.replies import Provenance, Usage, json_text
from tokenyard.protocol.wire import Request, request_fields
from tokenyard.yard.listing import Owners, Query, RequestList, find_owners, list_requests
from tokenyard.yard.requests import STATES

IN_FLIGHT = frozenset({"waiting", "assigned"})
#: Commands of a look at twenty requests, however many there are: the yard's view, a page of each
#: intake, and what is asked of each that is shown.
FEW = 50


def listed(yard: PlayedYard, **query: Any) -> RequestList:
    return list_requests(yard, Query(**query))


def ids(yard: PlayedYard, **query: Any) -> list[str]:
    return [one.id for one in listed(yard, **query).requests]


def complete(yard: PlayedYard, worker: str, request: Request, model: str = "adder") -> None:
    assignment = yard.assign(worker, request)
    said = {
        "provenance": json_text(Provenance(model, "", "vllm", "1", worker, 1)),
        "usage": json_text(Usage(3, 5, 8)),
    }
    yard.finish(worker, assignment, [1, 2], **said)


def one_of_each_state(yard: PlayedYard) -> None:
    """Six requests, each called like its state."""
    worker = yard.worker("w")
    complete(yard, worker, make_request("completed", client="ann", model="adder"))
    for name, code in (("failed", Code.MODEL_UNAVAILABLE), ("expired", Code.DEADLINE_EXCEEDED)):
        request = make_request(name, client="bob")
        yard.answer(yard.submit(request), code)
    yard.scripts.cancel("ann", "cancelled", "the test says so")
    yard.assign(worker, make_request("assigned", client="ann", model="adder"))
    yard.submit(make_request("waiting", client="bob", model="other"))


def test_an_empty_yard_has_no_requests(yard: PlayedYard) -> None:
    assert listed(yard).requests == []
    assert listed(yard).is_whole


def test_every_state_is_found_and_can_be_asked_for(yard: PlayedYard) -> None:
    one_of_each_state(yard)
    assert sorted(ids(yard)) == sorted(STATES)
    for state in STATES:
        assert ids(yard, states=frozenset({state})) == [state]


def test_fields_of_listed_requests(yard: PlayedYard) -> None:
    one_of_each_state(yard)
    found = {one.id: one for one in listed(yard).requests}
    completed, assigned, waiting = found["completed"], found["assigned"], found["waiting"]
    worker = completed.worker
    assert worker.startswith("w.")
    assert (completed.client, completed.model, completed.tokens) == ("ann", "adder", 5)
    assert (assigned.worker, assigned.model, assigned.attempt) == (worker, "adder", 1)
    assert (waiting.client, waiting.model, waiting.worker) == ("bob", "other", "")
    assert found["failed"].error == "MODEL_UNAVAILABLE"
    assert found["cancelled"].accepted_ms == 0 < found["cancelled"].ended_ms
    ledger = yard.ledger(make_request("waiting", client="bob"))
    assert waiting.server_id == ledger["sid"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"client": "bob"}, ["expired", "failed", "waiting"]),
        ({"model": "adder"}, ["assigned", "completed"]),
        ({"model": "other"}, ["waiting"]),
        ({"id": "completed"}, ["completed"]),
        ({"id": "assigned", "client": "ann"}, ["assigned"]),
        ({"id": "assigned", "client": "bob"}, []),
        ({"id": "assigned", "model": "adder"}, ["assigned"]),
        ({"id": "waiting", "model": "adder"}, []),
        ({"id": "failed", "states": IN_FLIGHT}, []),
        ({"id": "nobodys"}, []),
        ({"worker": "w"}, ["assigned", "completed"]),
        ({"worker": "w.1", "states": IN_FLIGHT}, ["assigned"]),
        ({"worker": "w.2"}, []),
        ({"error": "model_unavail"}, ["failed"]),
        ({"error": "THE TEST SAYS SO"}, ["cancelled", "expired", "failed"]),
        ({"error": "DEADLINE_EXCEEDED: the"}, ["expired"]),
        ({"error": ".*"}, []),
        ({"tenant": "acme"}, []),
    ],
)
def test_requests_are_filtered(yard: PlayedYard, query: dict[str, Any], found: list[str]) -> None:
    one_of_each_state(yard)
    assert sorted(ids(yard, **query)) == found


def test_requests_of_a_tenant_in_each_state(yard: PlayedYard) -> None:
    worker = yard.worker()
    for tenant in ("acme", "bolt"):
        for state in ("waits", "runs", "done"):
            request = make_request(f"{tenant}-{state}", tenant=tenant)
            waiting = yard.submit(request, "low")
            if state != "waits":
                assignment = yard.place(waiting, worker)
            if state == "done":
                yard.finish(worker, assignment)
    assert sorted(ids(yard, tenant="acme")) == ["acme-done", "acme-runs", "acme-waits"]
    assert ids(yard, tenant="") == ids(yard)
    assert {one.tenant for one in listed(yard).requests} == {"acme", "bolt"}


def test_one_id_of_several_clients(yard: PlayedYard) -> None:
    for client in ("anon", "ann", "bob"):
        yard.submit(make_request("q", client=client))
    yard.push(request_fields(make_request("plain", client="cid")))
    found = listed(yard, id="q").requests
    assert sorted(one.client for one in found) == ["ann", "anon", "bob"]
    assert [one.client for one in listed(yard, id="plain").requests] == ["cid"]


def test_an_id_with_its_client_costs_no_search(yard: PlayedYard, counting: redis.Redis) -> None:
    one_of_each_state(yard)
    found = list_requests(Yard(counting, yard.keys), Query(id="failed", client="bob"))
    assert [one.error for one in found.requests] == ["MODEL_UNAVAILABLE"]
    assert not {"SCAN", "XRANGE", "XREVRANGE"} & set(Counting.sent)


def test_a_request_that_waits_again_is_found_by_its_fault(yard: PlayedYard) -> None:
    worker = yard.worker()
    yard.scripts.hand_back(worker, yard.assign(worker, make_request("q")), 0, "Out of memory")
    [found] = listed(yard, error="out of").requests
    assert (found.state, found.message) == ("waiting", "Out of memory")
    [found] = listed(yard, id="q").requests
    assert found.message == "Out of memory"


def test_client_filter_is_not_a_glob_pattern(yard: PlayedYard) -> None:
    """What SCAN takes for a pattern is a name here."""
    yard.scripts.cancel("ann", "q", "for a test")
    for client in ("a*", "*", "a?n", "[a]nn", "ann\\"):
        assert ids(yard, client=client) == []


@pytest.mark.parametrize("entry", ["{0}-0", "1000-{0}"], ids=["ms", "within one"])
def test_order_and_limit(yard: PlayedYard, entry: str) -> None:
    names = [f"q{number}" for number in range(12)]
    for number, name in enumerate(names, 1):
        yard.push(request_fields(make_request(name)), entry=entry.format(number))
    assert ids(yard, oldest_first=True) == names
    assert ids(yard, limit=3, oldest_first=True) == names[:3]
    assert ids(yard, limit=3) == names[:-4:-1]


def test_listing_by_age(yard: PlayedYard) -> None:
    seconds, _ = yard.connection.time()
    for name, ago_s in (("old", 600), ("young", 60), ("new", 0)):
        made = request_fields(make_request(name))
        yard.push(made, entry=f"{(seconds - ago_s) * 1000}-{len(name)}")
    for oldest_first in (False, True):
        order: Callable[[list[str]], list[str]] = sorted if oldest_first else list
        assert set(ids(yard, older_ms=30_000, oldest_first=oldest_first)) == {"old", "young"}
        assert set(ids(yard, newer_ms=90_000, oldest_first=oldest_first)) == {"young", "new"}
        both = ids(yard, older_ms=30_000, newer_ms=90_000, oldest_first=oldest_first)
        assert order(both) == ["young"]


def test_rescued_request_keeps_its_age(yard: PlayedYard) -> None:
    worker = yard.worker("w")
    assignment = yard.assign(worker, make_request("again"))
    yard.submit(make_request("later"))
    yard.scripts.hand_back(worker, assignment, 0, "for a test")
    again = next(one for one in listed(yard).requests if one.id == "again")
    assert (again.state, again.server_id) == ("waiting", assignment.sid)
    assert ids(yard) == ["later", "again"]
    assert ids(yard, oldest_first=True, limit=1) == ["again"]


def test_control_entries_are_not_listed(yard: PlayedYard) -> None:
    worker = yard.worker("w")
    yard.connection.xadd(yard.keys.lane(worker), {"cancel": "1-0"})
    yard.push({"prompt": "from nobody"})
    assert listed(yard).requests == []


def test_waiting_request_names_its_pause(yard: PlayedYard) -> None:
    yard.worker("w")
    yard.scripts.register("x", LONG_MS, worker_json("x", model="other"))
    yard.submit(make_request("held", model="adder"))
    yard.submit(make_request("free", model="other"))
    Signals(yard).give(Order(signal="PAUSE", scope="model:adder", by="kim@north", why="its driver"))
    found = {one.id: one for one in listed(yard).requests}
    [pause] = found["held"].pauses
    assert (pause.scope, pause.by, pause.why) == ("model:adder", "kim@north", "its driver")
    assert found["free"].pauses == []


def fill(yard: PlayedYard, count: int, **fields: Any) -> None:
    pipeline = yard.connection.pipeline(transaction=False)
    for number in range(count):
        made: Any = request_fields(make_request(f"many-{number}", **fields))
        pipeline.xadd(yard.keys.intake("normal"), made)
    pipeline.execute()


def test_thousands_that_wait_cost_no_more_than_a_few(
    yard: PlayedYard, counting: redis.Redis
) -> None:
    fill(yard, 5000)
    found = list_requests(Yard(counting, yard.keys), Query(limit=20, states=IN_FLIGHT))
    assert [one.id for one in found.requests] == [f"many-{4999 - at}" for at in range(20)]
    sent = Counting.sent
    assert 3 <= sent.count("XREVRANGE") + sent.count("XRANGE") <= 5, sent
    assert sent.count("STRLEN") == 20
    assert len(sent) <= FEW, sent
    assert not {"KEYS", "SCAN"} & set(sent)


def test_listing_reports_that_it_reached_its_limit(yard: PlayedYard, counting: redis.Redis) -> None:
    fill(yard, 3000, client="ann")
    waiting = frozenset({"waiting"})
    found = list_requests(
        Yard(counting, yard.keys), Query(client="nobody", states=waiting, most=1000)
    )
    assert (found.requests, found.is_whole) == ([], False)
    assert 10 <= Counting.sent.count("XREVRANGE") + Counting.sent.count("XRANGE") <= 14
    whole = list_requests(yard, Query(client="nobody", states=waiting))
    assert (whole.requests, whole.is_whole) == ([], True)


def test_scan_of_ledgers_is_limited(yard: PlayedYard) -> None:
    pipeline = yard.connection.pipeline(transaction=False)
    for number in range(4000):
        pipeline.hset(yard.keys.ledger("ann", str(number)), mapping={"state": "waiting"})
    pipeline.execute()
    over = frozenset({"completed"})
    assert not listed(yard, states=over, most_keys=1000).is_whole
    assert find_owners(yard, "nobodys", most_keys=1000) == Owners([], is_whole=False)


def test_a_user_without_scan_sees_what_is_in_flight(yard: PlayedYard, redis_url: str) -> None:
    one_of_each_state(yard)
    with (
        limited_user(redis_url, "+@all", "-scan") as url,
        redis.Redis.from_url(url) as connection,
    ):
        limited = Yard(connection, yard.keys)
        found = list_requests(limited, Query())
        assert not found.may_scan
        assert sorted(one.id for one in found.requests) == ["assigned", "waiting"]
        with pytest.raises(NoPermissionError):
            find_owners(limited, "completed")


# Whose an id is


def test_the_only_client_that_has_an_id(yard: PlayedYard) -> None:
    one_of_each_state(yard)
    assert find_owners(yard, "completed") == Owners(["ann"])
    assert find_owners(yard, "waiting") == Owners(["bob"])
    assert find_owners(yard, "unheard-of") == Owners([])


def test_several_clients_that_have_an_id(yard: PlayedYard) -> None:
    for client in ("bob", "ann"):
        yard.scripts.cancel(client, "q1", "for a test")
    assert find_owners(yard, "q1") == Owners(["ann", "bob"])
    # anon is who is meant where nobody is named
    yard.scripts.cancel("anon", "q1", "for a test")
    assert find_owners(yard, "q1") == Owners(["anon"])


@pytest.mark.parametrize("name", ["q*", "q?", "[q]1", "q\\", "a/q1", "^q", "é"])
def test_request_id_is_not_a_glob_pattern(yard: PlayedYard, name: str) -> None:
    for other in ("q1", "qq", "q", "b/a/q1"):
        yard.scripts.cancel("bob", other, "for a test")
    assert find_owners(yard, name) == Owners([])
    yard.scripts.cancel("ann", name, "for a test")
    assert find_owners(yard, name) == Owners(["ann"])


def test_the_client_of_a_plain_request_that_waits(yard: PlayedYard) -> None:
    yard.push(request_fields(make_request("plain", client="ann")))
    assert find_owners(yard, "plain") == Owners(["ann"])


def test_other_yards_are_others(yard: PlayedYard) -> None:
    other = Keys(random_name("other"))
    yard.connection.hset(other.ledger("ann", "q1"), mapping={"state": "completed"})
    assert find_owners(yard, "q1") == Owners([])
    assert ids(yard) == []


def test_a_worker_that_is_paused_holds_what_is_on_its_lane(yard: PlayedYard) -> None:
    worker = yard.scripts.register("w", LONG_MS, worker_json("w", run_state="PAUSED"))
    yard.assign(worker, make_request("kept"))
    [kept] = listed(yard).requests
    assert [pause.scope for pause in kept.pauses] == ["worker:w"]


def test_numbers_that_a_client_wrote_into_its_ledger(yard: PlayedYard) -> None:
    # The operator saw no request of anybody.
    one_of_each_state(yard)
    odd = "9" * 5000
    fields = {"state": "failed", "sid": f"normal/{odd}-1", "attempt": odd, "ended": odd}
    yard.connection.hset(yard.keys.ledger("mallory", "q"), mapping=fields)

    assert {"completed", "failed", "q"} <= set(ids(yard))
