"""The page of requests: what it finds, how far it looks, and what operators do there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import redis

from tests.board.looking import Looker, links_of, text_of, values_of
from tests.board.request_rig import HOSTILE, fail, ids, state_of
from tests.integration.test_listing import fill, one_of_each_state
from tests.support.builders import make_request
from tests.support.counting import Counting
from tests.support.yard import PlayedYard
from tokenyard.board.page import Actor, Parameters
from tokenyard.board.pages import requests as listing
from tokenyard.board.pages.requests import given_place, place_text, view_requests
from tokenyard.ops.names import named_request
from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.wire import request_fields

pytestmark = [pytest.mark.valkey_only, pytest.mark.usefixtures("wide_search")]
#: Commands of a page of twenty requests, however many there are.
FEW = 60


# What is found


def test_an_empty_yard_has_words(looker: Looker) -> None:
    assert "No request waits or runs" in looker.get("/requests")
    assert "No request matches" in looker.get("/requests?state=failed")


def test_without_a_question_only_requests_in_flight_are_shown_and_nothing_is_scanned(
    looker: Looker, yard: PlayedYard, counting: redis.Redis
) -> None:
    one_of_each_state(yard)
    assert ids(looker.get("/requests")) == ["assigned", "waiting"]
    view_requests(Yard(counting, yard.keys, ""), Parameters({}, looker.actor))
    assert not {"SCAN", "KEYS"} & set(Counting.sent)


def test_a_state_can_be_asked_for(looker: Looker, yard: PlayedYard) -> None:
    one_of_each_state(yard)
    page = looker.get("/requests?state=expired")
    assert ids(page) == ["expired"]
    assert re.findall(r'<input type="checkbox" name="state" value="(\w+)" checked>', page) == [
        "expired"
    ]


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("client=bob", ["waiting"]),
        ("client=bob&state=failed&state=expired", ["expired", "failed"]),
        ("model=adder", ["assigned"]),
        ("worker=w", ["assigned"]),
        ("error=model_UNAVAILABLE", ["failed"]),
        ("id=completed", ["completed"]),
        ("id=failed&client=bob", ["failed"]),
        ("newer=1h", ["assigned", "waiting"]),
        ("older=1h", []),
        ("tenant=acme", []),
    ],
)
def test_filters(looker: Looker, yard: PlayedYard, question: str, found: list[str]) -> None:
    one_of_each_state(yard)
    assert sorted(ids(looker.get(f"/requests?{question}"))) == sorted(found)


def test_requests_of_a_tenant_are_found_in_its_intakes(looker: Looker, yard: PlayedYard) -> None:
    yard.scripts.submit("low", [make_request("own", tenant="acme")])
    yard.submit(make_request("other"))
    page = looker.get("/requests?tenant=acme")
    assert ids(page) == ["own"]
    assert "/tenants/acme" in looker.get(links_of(page, "own")[0])
    assert sorted(ids(looker.get("/requests"))) == ["other", "own"]


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("state=sleeping", "state: give one or more of"),
        ("older=soon", "older: 'soon': give a time like"),
        ("older=2h&newer=1h", "newer: give a longer time"),
        ("older=1h&newer=60m", "newer: give a longer time"),
        ("client=a*", "client: use 1 to 100"),
        ("id=" + "x" * 201, "1 to 200 bytes"),
        ("order=sideways", "order: give one of"),
    ],
)
def test_questions_that_make_no_sense(looker: Looker, question: str, told: str) -> None:
    assert told in text_of(looker.get(f"/requests?{question}", 400))


# Pages


def numbered(yard: PlayedYard, numbers: range) -> None:
    for number in numbers:
        fields: Any = request_fields(make_request(f"q{number}", client="ann"))
        yard.push(fields, entry=f"{1000 + number}-0")


def pages_of(looker: Looker, first: str) -> Iterator[list[str]]:
    page = looker.get(first)
    while True:
        yield ids(page)
        following = links_of(page, "Next page")
        if not following:
            return
        page = looker.get(following[0])


@pytest.mark.parametrize("order", ["oldest", "newest"])
def test_pages_show_each_request_once(looker: Looker, yard: PlayedYard, order: str) -> None:
    numbered(yard, range(120))
    seen = list(pages_of(looker, f"/requests?order={order}"))
    assert [len(page) for page in seen] == [50, 50, 20]
    names = [f"q{number}" for number in range(120)]
    assert [*itertools.chain(*seen)] == (names if order == "oldest" else names[::-1])


@pytest.mark.parametrize("order", ["oldest", "newest"])
def test_pages_stay_stable_while_requests_come_and_go(
    looker: Looker, yard: PlayedYard, order: str
) -> None:
    numbered(yard, range(120))
    following = pages_of(looker, f"/requests?order={order}")
    first = next(following)
    numbered(yard, range(120, 140))
    yard.scripts.cancel("ann", first[-1], "for a test")  # the mark of the next page
    yard.scripts.cancel("ann", first[0], "for a test")
    rest = [*itertools.chain(*following)]
    assert not set(first) & set(rest)
    came = {f"q{number}" for number in range(120, 140)} if order == "oldest" else set()
    assert set(rest) == {f"q{number}" for number in range(120)} - set(first) | came


def test_requests_of_one_millisecond_are_shown_once(looker: Looker, yard: PlayedYard) -> None:
    for number in range(80):
        fields: Any = request_fields(make_request(f"q{number}", client="ann"))
        for intake in ("normal", "low"):  # the same entry in both
            fields["client"] = intake
            yard.push(fields, intake=intake, entry=f"1000-{number + 1}")
    seen = list(pages_of(looker, "/requests"))
    assert [len(page) for page in seen] == [50, 50, 50, 10]


@pytest.mark.parametrize("request_id", HOSTILE)
def test_a_place_survives_its_address(request_id: str) -> None:
    place = (5, 7, "ann", request_id)
    assert given_place(place_text(place)) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1-1",
        "1-1/",
        "1-1/a*/b",
        "/" * 9,
        "9" * 99 + "/a/b",
        f"{2**64}-0/a/b",
        f"1-{2**64}/a/b",
    ],
)
def test_a_place_that_is_none(text: str) -> None:
    place = given_place(text)
    assert place is None or place[:2] == (0, 0)


# Bounds


def asked(counting: redis.Redis, yard: PlayedYard, **given: str) -> dict[str, Any]:
    values = {name: [value] for name, value in given.items()}
    return view_requests(
        Yard(counting, yard.keys, ""), Parameters(values, Actor("olga", "operator"))
    )


def test_thousands_that_wait_cost_as_few_commands_as_one_page(
    yard: PlayedYard, counting: redis.Redis
) -> None:
    fill(yard, 5000)
    found = asked(counting, yard)
    assert len(found["found"].requests) == listing.LIMIT
    assert found["found"].has_more
    assert len(Counting.sent) - listing.LIMIT <= FEW, Counting.sent


def test_many_tenants_and_workers_are_not_all_read(yard: PlayedYard, counting: redis.Redis) -> None:
    for number in range(60):
        yard.scripts.submit("normal", [make_request(f"q{number}", tenant=f"t{number}")])
        yard.assign(yard.worker(f"w{number}"), make_request(f"a{number}"))
    found = asked(counting, yard)
    sent = Counting.sent
    assert sent.count("XRANGE") <= 2 * listing.MOST_STREAMS + 5, sent
    assert sent.count("XLEN") <= 3 * listing.MOST_STREAMS + 10, sent
    assert found["found"].missed == {"tenants", "workers"}
    told = " ".join(found["missed"])
    assert "Give a tenant" in told
    assert "Give a worker" in told
    # Narrowed, each is found.
    Counting.sent.clear()
    [last] = asked(counting, yard, tenant="t59")["found"].requests
    assert last.id == "q59"
    assert len(Counting.sent) <= FEW
    [running] = asked(counting, yard, worker="w59")["found"].requests
    assert running.id == "a59"


def test_a_search_in_the_queues_says_where_it_stopped(
    yard: PlayedYard, counting: redis.Redis
) -> None:
    fill(yard, 3000, client="ann")
    found = asked(counting, yard, client="nobody")
    assert found["found"].missed == {"entries"}
    assert "2,000 entries of the queues" in found["missed"][0]
    assert Counting.sent.count("XRANGE") <= listing.MOST_ENTRIES / 100 + 8


@pytest.mark.long
def test_a_search_of_ledgers_goes_on_where_it_stopped(
    looker: Looker, yard: PlayedYard, counting: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MOST_KEYS", 1000)
    pipeline = yard.connection.pipeline(transaction=False)
    names = {f"q{number}" for number in range(3000)}
    for name in names:
        ledger = yard.keys.ledger("ann", name)
        pipeline.hset(ledger, mapping={"state": "completed", "sid": "low/5-0", "ended": 9})
    pipeline.execute()
    asked(counting, yard, state="completed")
    assert Counting.sent.count("SCAN") == 1
    assert Counting.sent.count("HMGET") <= 1200

    seen: set[str] = set()
    page = looker.get("/requests?state=completed")
    assert "Only 1,000 keys of the server were searched" in page
    for _ in range(500):
        seen |= set(ids(page))
        following = links_of(page, "Next page") or links_of(page, "Search on")
        if not following:
            break
        page = looker.get(following[0])
    assert seen == names


def test_a_list_of_ended_ones_is_not_live(looker: Looker) -> None:
    live = '<section id="live_list" class="requests" data-live>'
    assert live in looker.get("/requests")
    assert live not in looker.get("/requests?state=completed")


# Hostile names


@pytest.mark.parametrize("request_id", HOSTILE)
def test_hostile_ids_are_shown_linked_and_selected(
    looker: Looker, yard: PlayedYard, request_id: str
) -> None:
    yard.submit(make_request(request_id, client="ann", model=request_id))
    page = looker.get("/requests")
    assert request_id not in page or request_id.isprintable()
    for mark in ("<script>alert", "<img", "\x00", "\x1b", "\u202e", "\u200f"):
        assert mark not in page
    assert ("{{ 7 * 7 }}" in page) == (request_id.startswith("{{"))
    [link] = re.findall(r'href="/board(/request\?[^"]*)"', page)
    assert f"<bdi>{'x' * 200}" in looker.get(link.replace("&amp;", "&")) or request_id != "x" * 200
    [name] = values_of(page, "request")
    assert name.isascii()
    assert named_request(name) == ("ann", request_id)
    looker.do("request.cancel", {"request": name})
    assert state_of(yard, "ann", request_id) == "cancelled"
    exact = quote(request_id, safe="")
    assert "cancelled" in text_of(looker.get(f"/requests?client=ann&id={exact}"))


@pytest.mark.parametrize("name", ["", "ann", "a*/q", "ann/", "ann/" + "x" * 201, "/q"])
def test_names_of_no_request(name: str) -> None:
    with pytest.raises(BadInput):
        named_request(name)


def test_a_long_error_is_cut(looker: Looker, yard: PlayedYard) -> None:
    fail(yard, make_request("q"), "POISONED: " + "<b>" * 300_000)
    page = looker.get("/requests?state=failed")
    assert len(page) < 20_000
    assert "<b>" not in page


def test_a_page_leads_back_to_itself(looker: Looker, yard: PlayedYard) -> None:
    yard.submit(make_request("q", client="ann"))
    page = looker.get("/requests?client=ann&order=newest")
    back = values_of(page, "back")[0]
    answer = looker.post("request.cancel", {"request": "ann/q", "back": back})
    assert answer.headers["location"].startswith("/board/requests?client=ann&order=newest&done=")
    assert "1 request cancelled." in looker.get(answer.headers["location"])
