"""The page of the yard: figures, charts, tenants, errors, coordinators, broker, doctor."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from tests.board.calls import Calls
from tests.board.looking import Looker, looking, text_of
from tests.board.request_rig import fail
from tests.support.builders import make_request
from tests.support.servers import limited_user
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.board.pages import yard as checkup
from tokenyard.doctor import diagnose
from tokenyard.doctor.evidence import Evidence
from tokenyard.doctor.evidence import gather as really_gather
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order
from tokenyard.protocol.keys import PRIORITY_CLASSES, Yard
from tokenyard.protocol.leader_reports import HistorySample, history_fields
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.telemetry.queues import MOST_OF_LINE

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J"


def record(yard: PlayedYard, ago_s: float, **fields: object) -> None:
    """Add an entry to the history, some time ago."""
    seconds, _ = yard.connection.time()
    values = {"at_ms": 0, "waiting": {}, "seconds": 10.0, **fields}
    packed = history_fields(HistorySample(**values))  # type: ignore[arg-type]
    key = yard.keys.history
    yard.connection.xadd(key, packed, id=f"{int(1000 * (seconds - ago_s))}-*")  # type: ignore[arg-type]


@pytest.mark.usefixtures("yard")
def test_an_empty_yard_is_told_in_words(looker: Looker) -> None:
    page = text_of(looker.get("/"))

    assert "first figures 10 s after a coordinator leads" in page
    assert "nothing in this time" in page
    assert "No tenant waits." in page
    assert "No dead letter, no crashed worker, no load that failed." in page
    assert "Leads coordinator, epoch 1" in page
    assert "Stand by none If the leader's host dies, nobody takes over." in page
    assert "no model is served" in page


def test_without_a_leader_it_says_what_that_means(looker: Looker, yard: PlayedYard) -> None:
    yard.scripts.resign(yard.token)
    assert "No coordinator leads" in text_of(looker.live("/", "live_state"))


def test_figures_of_the_last_minute_and_of_the_last_hour(looker: Looker, yard: PlayedYard) -> None:
    # Given a minute in which 300 requests ended, 6 of them failed, and an hour with more
    record(yard, 1_800, finished=1_000, tokens=70_000, dead=2)
    for ago_s in range(55, 0, -10):
        record(yard, ago_s, finished=50, failed=1, tokens=5_000, running=7, ttft=[0] * 6 + [100])
    for name in ("a", "b"):
        yard.worker(name)

    page = text_of(looker.live("/", "live_figures"))

    assert "Requests 5 per second 6 failed in the last minute" in page
    assert "Tokens 500 per second 100 k in the last hour" in page
    assert "Waiting 0 requests 7 on lanes" in page
    assert "Workers 2 of 2 ready 1 model served" in page
    assert "First token 75 ms p50 100 ms p99" in page
    assert "Wait - p50 - p99" in page
    assert "Dead letters 0 2 in the last hour" in page


def test_charts_have_gaps_where_nobody_wrote(looker: Looker, yard: PlayedYard) -> None:
    for ago_s in (*range(1_495, 900, -10), *range(295, 0, -10)):
        record(yard, ago_s, finished=50, wait=[0] * 7 + [9, 1])

    page = looker.get("/")

    assert page.count('<svg viewBox="0 0 360 132"') == 6
    wait = page[page.index('id="wait-text"') :]
    lines = [one for one in wait.split("</svg>")[0].split("<path") if "line" in one]
    assert len(lines) == 2, "p50 and p99"
    assert all(one.count("M") == 2 for one in lines), "one gap in each"


def test_waiting_requests_and_the_wait_to_expect(looker: Looker, yard: PlayedYard) -> None:
    yard.worker()
    yard.connection.hset(yard.keys.info, "rate", "2.0")
    for _ in range(10):
        yard.submit(make_request(), "low")

    page = text_of(looker.live("/", "live_queue"))
    assert "low 10" in page
    assert "5.0 s" in page
    assert "at 2 requests per second" in page


def test_nobody_knows_the_wait_while_no_worker_serves(looker: Looker, yard: PlayedYard) -> None:
    yard.connection.hset(yard.keys.info, "rate", "2.0")
    yard.submit(make_request(), "low")

    assert "No worker serves now" in text_of(looker.live("/", "live_queue"))


def test_tenants_in_line_with_share_and_wait(looker: Looker, yard: PlayedYard) -> None:
    yard.worker()
    yard.connection.hset(yard.keys.info, "rate", "1.0")
    yard.connection.hset(yard.keys.tenants, "ann", encode_tenant(TenantSettings(weight=3.0)))
    for tenant, count in (("ann", 3), ("bob", 9)):
        for _ in range(count):
            yard.submit(make_request(tenant=tenant))

    page = text_of(looker.live("/", "live_tenants"))
    assert "bob 9 0 25.0 % 12 s ann 3 0 75.0 % 4.0 s" in page
    assert "12 of these are of tenants" in text_of(looker.live("/", "live_queue"))


def test_of_many_tenants_a_bounded_number_is_read(looker: Looker, yard: PlayedYard) -> None:
    for number in range(150):
        yard.submit(make_request(tenant=f"t{number:03}"))

    page = text_of(looker.live("/", "live_tenants"))
    assert page.count("t0") + page.count("t1") == 10
    assert "140 more are in line; these have most, of the 100 that are served next." in page


def test_errors_are_named_and_are_text(looker: Looker, yard: PlayedYard) -> None:
    fail(yard, make_request(f"q-{HOSTILE}"), f"POISONED: {HOSTILE}")
    now_ms = yard.connection.time()[0] * 1000
    yard.worker("frail", last_error=HOSTILE + "z" * 1_000_000, last_error_ms=now_ms)

    page = looker.get("/")

    assert "<img" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "dead letter: POISONED: &lt;img" in page
    assert "(1,000,0" in page, "its length is told"
    assert len(page) < 60_000
    assert "Dead letters 1 Look at them" in text_of(page)


def test_a_pause_is_told(looker: Looker, yard: PlayedYard) -> None:
    order = Order(signal="PAUSE", by="ann@host", why="new driver")
    Signals(yard).give(order)

    state = text_of(looker.live("/", "live_state"))
    assert "all workers PAUSED by ann@host: new driver" in state


def test_standbys_are_named_and_the_leader_is_none(looker: Looker, yard: PlayedYard) -> None:
    for name in ("north", "south", "coordinator"):
        yard.scripts.stand_by(name, 60_000)

    assert "Stand by north, south" in text_of(looker.live("/", "live_coordinators"))


def test_the_broker_and_what_it_can_confirm(looker: Looker) -> None:
    page = text_of(looker.live("/", "live_broker"))

    assert "Server Valkey" in page or "Server Redis" in page
    assert "Durability memory confirmed" in page
    assert "Durability replicated cannot be confirmed no replica is online" in page


def test_the_doctor_looks_in_the_background_at_most_once_a_minute(
    looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a doctor who takes long
    looks: list[object] = []
    may_end = False

    def gather(*args: object) -> Evidence:
        looks.append(args)
        eventually(lambda: may_end)
        return Evidence(unseen={"INFO": "not allowed"})

    monkeypatch.setattr("tokenyard.board.pages.yard.gather", gather)

    # I expect the page not to wait for it,
    assert "The first examination is under way." in text_of(looker.live("/", "live_doctor"))
    may_end = True
    # to show what it finds, with its age,
    count = len(list(diagnose(Evidence(unseen={"INFO": "not allowed"}))))

    def shown() -> str:
        page = text_of(looker.live("/", "live_doctor"))
        return page if f"{count} checks at" in page else ""

    page = eventually(shown)
    assert "unknown version INFO is refused" in page
    # and not to ask again.
    looker.get("/")
    assert len(looks) == 1


def test_the_doctor_looks_again_after_a_time(
    looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []

    def gather(*args: object) -> Evidence:
        looks.append(args)
        return Evidence()

    monkeypatch.setattr("tokenyard.board.pages.yard.gather", gather)
    monkeypatch.setattr(checkup, "LEAST_S", 0.0)
    monkeypatch.setattr(checkup, "REST", 0.0)
    eventually(lambda: looker.get("/") and len(looks) >= 2)


def test_what_the_user_may_not_ask_is_asked_once(
    redis_url: str, bare: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a board whose user may ask for neither INFO nor CONFIG nor the log of refusals
    looked: list[Evidence] = []

    def gather(*args: Any) -> Evidence:
        looked.append(found := really_gather(*args))
        return found

    monkeypatch.setattr("tokenyard.board.pages.yard.gather", gather)
    monkeypatch.setattr(checkup, "LEAST_S", 0.0)
    monkeypatch.setattr(checkup, "REST", 0.0)
    with (
        limited_user(redis_url, "+@all", "-info", "-config", "-acl") as url,
        looking(monkeypatch, url, bare) as guarded,
    ):
        # If it is looked at again and again
        eventually(lambda: "checks at" in text_of(guarded.live("/", "live_doctor")))
        bare.connection.acl_log_reset()
        most = len(looked) + 5
        while len(looked) < most:
            assert "does not let us read INFO" in guarded.live("/", "live_broker")
            guarded.live("/", "live_doctor")

        # I expect no more refusals in the server's log than those of the first time. (Once the user
        # is deleted, a look that is under way is refused.)
        user = urlsplit(url).username
        assert [one for one in bare.connection.acl_log() if one["username"] == user] == []


def test_a_doctor_who_cannot_look_says_why(looker: Looker, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(*args: object) -> Evidence:
        raise redis.ConnectionError("it is <gone>")

    monkeypatch.setattr("tokenyard.board.pages.yard.gather", gather)

    def shown() -> str:
        page = looker.live("/", "live_doctor")
        return page if "It could not look" in page else ""

    assert "it is &lt;gone&gt;" in eventually(shown)


def test_the_page_asks_for_as_many_keys_of_a_large_yard(
    looker: Looker, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenyard.board.pages.yard.gather", lambda *_: Evidence())

    def commands() -> int:
        calls = Calls(yard.connection)
        looker.get("/")
        return sum(calls.made().values())

    yard.worker("first")
    few = commands()
    for number in range(300):
        yard.worker(f"w{number}")
        yard.submit(make_request())
    assert commands() <= few + 3
    # Of tenants the first hundred in line are counted, and the ages of some looked at.
    for number in range(300):
        yard.submit(make_request(tenant=f"t{number}"))
    assert commands() <= few + 3 + 100 + 2 * MOST_OF_LINE * len(PRIORITY_CLASSES)


def test_an_open_page_gets_blocks_only_when_they_change(looker: Looker, yard: PlayedYard) -> None:
    record(yard, 5, finished=50)

    def look() -> dict[str, str]:
        return {name: looker.live("/", name) for name in ("live_figures", "live_charts")}

    eventually(lambda: look() == look())  # a step of the charts may end between the two
