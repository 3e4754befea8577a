"""The page of signals: who asked, why, who has not obeyed; and the actions, which never wait."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.board.calls import Calls
from tests.board.looking import Looker, text_of
from tests.support.builders import worker_json
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import (
    ALL,
    Acknowledgement,
    DesiredState,
    Order,
    RunState,
    model_scope,
    worker_scope,
)

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


def signals(yard: PlayedYard) -> Signals:
    return Signals(yard)


def desired(yard: PlayedYard, scope: str) -> DesiredState:
    return signals(yard).desired_states().by_scope.get(scope, DesiredState())


def verbs(yard: PlayedYard) -> list[str]:
    return [text.split('"')[3] for text in control(yard) if text.startswith('{"verb"')]


def control(yard: PlayedYard) -> list[str]:
    entries = yard.connection.xrange(yard.keys.control)
    return [next(iter(fields.values())).decode() for _, fields in entries]


def obey(yard: PlayedYard, worker: str, run_state: RunState = "RUNNING", **info: Any) -> None:
    """Let a worker follow the last change."""
    changed = yard.connection.hget(yard.keys.desired, "changed") or b"0-0"
    values = {"run_state": run_state, "obeyed": changed.decode(), **info}
    packed = worker_json(worker.rpartition(".")[0], **values)
    yard.scripts.renew(LONG_MS, [(worker, packed)])


def test_an_empty_yard_says_so(looker: Looker) -> None:
    page = text_of(looker.get("/signals"))

    assert "Every live worker follows the last signal." in page
    assert "Nothing is paused, and no epoch is set." in page
    assert "No worker has joined." in page
    assert "No signal was given lately." in page


def test_a_pause_is_given_at_once_and_shows_who_has_not_obeyed(
    looker: Looker, yard: PlayedYard
) -> None:
    # Given two workers that will not answer soon
    slow, quick = yard.worker("slow"), yard.worker("quick")
    # and a page that asks whether to pause them,
    asked = text_of(looker.ask("signal.pause", {"scope": ALL}))
    assert "PAUSE of all workers, 2 workers" in asked
    assert slow in asked
    assert quick in asked
    assert desired(yard, ALL).run_state == "RUNNING", "nothing has happened yet"

    # If it is done,
    answer = looker.post("signal.pause", {"scope": ALL, "mode": "wait", "why": "the driver"})
    # I expect the answer before any worker's, the desired state, and the audit,
    assert answer.status_code == 303
    state = desired(yard, ALL)
    assert (state.run_state, state.mode, state.by) == ("PAUSED", "wait", "olga@board")
    assert state.why == "the driver"
    entry = looker.audit()[0]
    assert (entry.action, entry.target, entry.why) == ("signal.pause", "all workers", "the driver")
    assert entry.details["mode"] == "wait"
    # and both named as not having obeyed, until they have.
    assert {slow, quick} <= set(text_of(looker.live("/signals", "live_left")).split())
    obey(yard, quick, "PAUSED")
    shown = text_of(looker.live("/signals", "live_left"))
    assert slow in shown
    assert quick not in shown
    obey(yard, slow, "PAUSED")
    assert "Every live worker follows" in looker.live("/signals", "live_left")
    row = text_of(looker.live("/signals", "live_set"))
    assert "PAUSED wait olga@board: the driver" in row


def test_why_a_worker_refuses_is_shown(looker: Looker, yard: PlayedYard) -> None:
    one = yard.worker()
    receipt = signals(yard).give(Order(signal="PAUSE"))
    refused = Acknowledgement(worker=one, done=False, reason=f"no sleep here {HOSTILE}")
    yard.scripts.acknowledge(receipt.ids[0], refused)

    page = looker.get("/signals")
    assert "no sleep here &lt;script&gt;" in page
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page


def test_the_way_through_all_run_states(looker: Looker, yard: PlayedYard) -> None:
    one = yard.worker("w", model="adder")
    scope = model_scope("adder")
    for action, state in (
        ("pause", "PAUSED"),
        ("suspend", "SUSPENDED"),
        ("resume", "PAUSED"),
        ("unpause", "RUNNING"),
    ):
        assert looker.post(f"signal.{action}", {"scope": scope}).status_code == 303
        assert desired(yard, scope).run_state == state
        assert looker.audit()[0].action == f"signal.{action}"
    given = text_of(looker.live("/signals", "live_given"))
    assert re.findall(r"\b[A-Z]{5,}\b", given) == ["UNPAUSE", "RESUME", "SUSPEND", "PAUSE"]
    assert one


@pytest.mark.parametrize(("action", "verb"), [("drain", "drain"), ("stop", "stop")])
def test_a_worker_that_shall_end_is_shown_until_it_has(
    looker: Looker, yard: PlayedYard, action: str, verb: str
) -> None:
    one, other = yard.worker("one"), yard.worker("other")

    answer = looker.post(f"signal.{action}", {"scope": worker_scope("one"), "why": "new disks"})

    assert answer.status_code == 303
    assert verbs(yard) == [verb]
    shown = text_of(looker.live("/signals", "live_left"))
    assert f"{verb.upper()} of worker one by olga@board: new disks: 1 worker not ended yet" in shown
    assert one in shown
    assert other not in shown
    yard.scripts.retire(one, "left")
    yard.connection.hdel(yard.keys.workers, one)
    assert "not ended" not in looker.live("/signals", "live_left")


def test_a_drain_of_many_is_one_line(looker: Looker, yard: PlayedYard) -> None:
    for number in range(30):
        yard.worker(f"w{number:02}", model="adder")
    asked = text_of(looker.ask("signal.drain", {"scope": model_scope("adder")}))
    assert "30 workers" in asked
    assert "and 20 more" in asked
    assert asked.count("w0") == 10

    looker.post("signal.drain", {"scope": model_scope("adder")})

    assert verbs(yard) == ["drain"] * 30
    given = text_of(looker.live("/signals", "live_given"))
    assert given.count("DRAIN") == 1
    assert "DRAIN 30 workers olga@board" in given


@pytest.mark.parametrize(
    ("action", "scope"),
    [
        ("suspend", ALL),  # not paused yet
        ("pause", model_scope("unknown")),
        ("stop", HOSTILE),
    ],
)
def test_what_is_not_possible_is_refused_and_changes_nothing(
    looker: Looker, yard: PlayedYard, action: str, scope: str
) -> None:
    yard.worker()

    told = looker.ask(f"signal.{action}", {"scope": scope}, status=400)
    answer = looker.post(f"signal.{action}", {"scope": scope})

    assert answer.status_code == 400
    assert "<script>alert" not in told + answer.text
    assert control(yard) == []
    assert looker.audit()[0].error, "the refusal is in the audit"


def test_nothing_is_asked_where_there_is_nothing_to_do(looker: Looker, yard: PlayedYard) -> None:
    one = yard.worker()
    looker.post("signal.pause", {"scope": ALL})
    obey(yard, one, "PAUSED")

    asked = looker.ask("signal.pause", {"scope": ALL})
    assert "all workers is PAUSED already." in text_of(asked)
    assert '<form class="fields"' not in asked
    # Without a worker there is nobody to drain; a pause is for those who join later.
    looker.post("signal.pause", {"scope": worker_scope("w")})
    yard.scripts.retire(one, "left")
    yard.connection.hdel(yard.keys.workers, one)
    asked = looker.ask("signal.drain", {"scope": worker_scope("w")})
    assert "worker w: no worker is live." in text_of(asked)
    assert '<form class="fields"' not in asked
    assert "0 workers" in text_of(looker.ask("signal.unpause", {"scope": worker_scope("w")}))


def test_an_unpause_says_what_still_holds_the_workers(looker: Looker, yard: PlayedYard) -> None:
    yard.worker("w", model="adder")
    looker.post("signal.pause", {"scope": ALL})
    looker.post("signal.pause", {"scope": model_scope("adder")})

    asked = text_of(looker.ask("signal.unpause", {"scope": model_scope("adder")}))

    assert "Still PAUSED: all workers." in asked


def test_epochs_are_shown(looker: Looker, yard: PlayedYard) -> None:
    one = yard.worker()
    signals(yard).give(Order(signal="SET_GENERATION_EPOCH", epoch=1234))
    obey(yard, one, epoch=1234)

    assert "1,234" in looker.live("/signals", "live_set")
    assert "1,234" in looker.live("/signals", "live_workers")
    assert "epoch 1234" in looker.live("/signals", "live_given")


def test_many_workers_come_in_pages_and_by_name(looker: Looker, yard: PlayedYard) -> None:
    for number in range(60):
        yard.worker(f"gpu-{number:02}")

    first, last = looker.get("/signals"), looker.get("/signals?page=3")
    assert first.count(">gpu-") == 25
    assert last.count(">gpu-") == 10
    assert "Page 3 of 3" in text_of(last)
    assert looker.get("/signals?page=4").count(">gpu-") == 10, "the last page"
    assert 'rel="next"' not in last
    found = looker.get("/signals?q=gpu-07")
    assert found.count(">gpu-") == 1
    assert "No worker has such a name." in text_of(looker.get("/signals?q=nobody"))
    looker.get("/signals?page=x", status=400)


def test_the_page_asks_for_as_many_keys_of_many_workers(looker: Looker, yard: PlayedYard) -> None:
    def commands() -> int:
        calls = Calls(yard.connection)
        looker.get("/signals")
        return sum(calls.made().values())

    yard.worker("first")
    few = commands()
    for number in range(200):
        yard.worker(f"w{number}")
    assert commands() <= few + 3
