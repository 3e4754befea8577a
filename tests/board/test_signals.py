"""The page of signals: who asked, why, who has not obeyed; and the actions, which never wait."""

from __future__ import annotations

import re

import pytest

from tests.board.yard_rig import Look, obey, text_of, worker
from tokenyard.admin.signals import Signals
from tokenyard.board.access import Door
from tokenyard.board.yard import Actor
from tokenyard.protocol.commands import Acknowledgement
from tokenyard.protocol.control import ALL, DesiredState, Order, model_scope, worker_scope

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


def signals(look: Look) -> Signals:
    return Signals(look.yard.connection, look.yard.keys)


def desired(look: Look, scope: str) -> DesiredState:
    return signals(look).desired_states().by_scope.get(scope, DesiredState())


def verbs(look: Look) -> list[str]:
    return [text.split('"')[3] for text in control(look) if text.startswith('{"verb"')]


def control(look: Look) -> list[str]:
    entries = look.yard.connection.xrange(look.yard.keys.control)
    return [next(iter(fields.values())).decode() for _, fields in entries]


def test_an_empty_yard_says_so(look: Look) -> None:
    page = text_of(look.at("/signals"))

    assert "Every live worker follows the last signal." in page
    assert "Nothing is paused, and no epoch is set." in page
    assert "No worker has joined." in page
    assert "No signal was given lately." in page


def test_a_pause_is_given_at_once_and_shows_who_has_not_obeyed(look: Look) -> None:
    # Given two workers that will not answer soon
    slow, quick = worker(look, "slow"), worker(look, "quick")
    # and a page that asks whether to pause them,
    asked = text_of(look.preview("signal.pause", scope=ALL))
    assert "PAUSE of all workers, 2 workers" in asked
    assert slow in asked
    assert quick in asked
    assert desired(look, ALL).run_state == "RUNNING", "nothing has happened yet"

    # If it is done,
    answer = look.do("signal.pause", scope=ALL, mode="wait", why="the driver")
    # I expect the answer before any worker's, the desired state, and the audit,
    assert answer.status_code == 303
    state = desired(look, ALL)
    assert (state.run_state, state.mode, state.by) == ("PAUSED", "wait", "local@board")
    assert state.why == "the driver"
    entry = look.audit
    assert (entry.action, entry.target, entry.why) == ("signal.pause", "all workers", "the driver")
    assert entry.details["mode"] == "wait"
    # and both named as not having obeyed, until they have.
    assert {slow, quick} <= set(text_of(look.live("/signals", "live_left")).split())
    obey(look, quick, "PAUSED")
    shown = text_of(look.live("/signals", "live_left"))
    assert slow in shown
    assert quick not in shown
    obey(look, slow, "PAUSED")
    assert "Every live worker follows" in look.live("/signals", "live_left")
    row = text_of(look.live("/signals", "live_set"))
    assert "PAUSED wait local@board: the driver" in row


def test_why_a_worker_refuses_is_shown(look: Look) -> None:
    one = worker(look)
    receipt = signals(look).give(Order(signal="PAUSE"))
    refused = Acknowledgement(worker=one, done=False, reason=f"no sleep here {HOSTILE}")
    look.yard.scripts.acknowledge(receipt.ids[0], refused)

    page = look.at("/signals")
    assert "no sleep here &lt;script&gt;" in page
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page


def test_the_way_through_all_run_states(look: Look) -> None:
    one = worker(look, "w", model="adder")
    scope = model_scope("adder")
    for action, state in (
        ("pause", "PAUSED"),
        ("suspend", "SUSPENDED"),
        ("resume", "PAUSED"),
        ("unpause", "RUNNING"),
    ):
        assert look.do(f"signal.{action}", scope=scope).status_code == 303
        assert desired(look, scope).run_state == state
        assert look.audit.action == f"signal.{action}"
    given = text_of(look.live("/signals", "live_given"))
    assert re.findall(r"\b[A-Z]{5,}\b", given) == ["UNPAUSE", "RESUME", "SUSPEND", "PAUSE"]
    assert one


@pytest.mark.parametrize(("action", "verb"), [("drain", "drain"), ("stop", "stop")])
def test_a_worker_that_shall_end_is_shown_until_it_has(look: Look, action: str, verb: str) -> None:
    one, other = worker(look, "one"), worker(look, "other")

    answer = look.do(f"signal.{action}", scope=worker_scope("one"), why="new disks")

    assert answer.status_code == 303
    assert verbs(look) == [verb]
    shown = text_of(look.live("/signals", "live_left"))
    assert (
        f"{verb.upper()} of worker one by local@board: new disks: 1 worker not ended yet" in shown
    )
    assert one in shown
    assert other not in shown
    look.yard.scripts.retire(one, "left")
    look.yard.connection.hdel(look.yard.keys.workers, one)
    assert "not ended" not in look.live("/signals", "live_left")


def test_a_drain_of_many_is_one_line(look: Look) -> None:
    for number in range(30):
        worker(look, f"w{number:02}", model="adder")
    asked = text_of(look.preview("signal.drain", scope=model_scope("adder")))
    assert "30 workers" in asked
    assert "and 20 more" in asked
    assert asked.count("w0") == 10

    look.do("signal.drain", scope=model_scope("adder"))

    assert verbs(look) == ["drain"] * 30
    given = text_of(look.live("/signals", "live_given"))
    assert given.count("DRAIN") == 1
    assert "DRAIN 30 workers local@board" in given


@pytest.mark.parametrize(
    ("action", "scope"),
    [
        ("suspend", ALL),  # not paused yet
        ("pause", model_scope("unknown")),
        ("pause", worker_scope("unknown")),
        ("pause", ""),
        ("drain", "model:"),
        ("stop", HOSTILE),
    ],
)
def test_what_is_not_possible_is_refused_and_changes_nothing(
    look: Look, action: str, scope: str
) -> None:
    worker(look)

    told = look.preview(f"signal.{action}", status=400, scope=scope)
    answer = look.do(f"signal.{action}", scope=scope)

    assert answer.status_code == 400
    assert "<script>alert" not in told + answer.text
    assert control(look) == []
    assert look.audit.error, "the refusal is in the audit"


def test_an_unknown_mode_is_refused(look: Look) -> None:
    assert look.do("signal.pause", scope=ALL, mode="hard").status_code == 400
    assert control(look) == []


def test_nothing_is_asked_where_there_is_nothing_to_do(look: Look) -> None:
    one = worker(look)
    look.do("signal.pause", scope=ALL)
    obey(look, one, "PAUSED")

    asked = look.preview("signal.pause", scope=ALL)
    assert "all workers is PAUSED already." in text_of(asked)
    assert '<form class="fields"' not in asked
    # Without a worker there is nobody to drain; a pause is for those who join later.
    look.do("signal.pause", scope=worker_scope("w"))
    look.yard.scripts.retire(one, "left")
    look.yard.connection.hdel(look.yard.keys.workers, one)
    asked = look.preview("signal.drain", scope=worker_scope("w"))
    assert "worker w: no worker is live." in text_of(asked)
    assert '<form class="fields"' not in asked
    assert "0 workers" in text_of(look.preview("signal.unpause", scope=worker_scope("w")))


def test_an_unpause_says_what_still_holds_the_workers(look: Look) -> None:
    worker(look, "w", model="adder")
    look.do("signal.pause", scope=ALL)
    look.do("signal.pause", scope=model_scope("adder"))

    asked = text_of(look.preview("signal.unpause", scope=model_scope("adder")))

    assert "Still PAUSED: all workers." in asked


def test_epochs_are_shown(look: Look) -> None:
    one = worker(look)
    signals(look).give(Order(signal="SET_GENERATION_EPOCH", epoch=1234))
    obey(look, one, epoch=1234)

    assert "1,234" in look.live("/signals", "live_set")
    assert "1,234" in look.live("/signals", "live_workers")
    assert "epoch 1234" in look.live("/signals", "live_given")


def test_many_workers_come_in_pages_and_by_name(look: Look) -> None:
    for number in range(60):
        worker(look, f"gpu-{number:02}")

    first, last = look.at("/signals"), look.at("/signals?page=3")
    assert first.count(">gpu-") == 25
    assert last.count(">gpu-") == 10
    assert "Page 3 of 3" in text_of(last)
    assert look.at("/signals?page=4").count(">gpu-") == 10, "the last page"
    assert 'rel="next"' not in last
    found = look.at("/signals?q=gpu-07")
    assert found.count(">gpu-") == 1
    assert "No worker has such a name." in text_of(look.at("/signals?q=nobody"))
    look.at("/signals?page=x", status=400)


def test_texts_of_others_are_text(look: Look) -> None:
    worker(look, "w", model=HOSTILE)
    order = Order(signal="PAUSE", scope=ALL, why=HOSTILE + "y" * 100_000, by=HOSTILE)
    signals(look).give(order)

    page = look.at("/signals")
    assert "<script>alert" not in page
    assert "\u202e" not in text_of(page)
    assert len(page) < 40_000


def test_the_page_asks_for_as_many_keys_of_many_workers(look: Look) -> None:
    def commands() -> int:
        before = look.yard.connection.info("commandstats")
        look.at("/signals")
        after = look.yard.connection.info("commandstats")
        return sum(
            one["calls"] - before.get(name, {"calls": 0})["calls"] for name, one in after.items()
        )

    worker(look, "first")
    few = commands()
    for number in range(200):
        worker(look, f"w{number}")
    assert commands() <= few + 3


def test_a_viewer_sees_it_and_may_do_nothing(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(look)

    async def enter(self: Door, request: object, role: str) -> Actor:
        return Actor("eve", "viewer")

    monkeypatch.setattr(Door, "enter", enter)
    page = look.at("/signals")
    assert "/do/signal" not in page
    assert ">w<" in page
