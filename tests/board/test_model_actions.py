"""What operators can do with models on the board: load, unload, put to sleep, wake, reload."""

from __future__ import annotations

import re
import threading

import pytest

from tests.board.device_yard import DeviceYard
from tests.board.looking import Looker, text_of
from tests.support.waiting import eventually
from tokenyard.board import operations
from tokenyard.board.operations import OPERATIONS
from tokenyard.ops.control import Signals, Unacknowledged
from tokenyard.protocol.control import Invalid
from tokenyard.protocol.errors import BrokerUnavailable

ALL_ACTIONS = ("model.load", "model.unload", "model.sleep", "model.wake", "model.reload")


@pytest.fixture
def two(devices: DeviceYard) -> DeviceYard:
    """Two devices of a host that may load two models; one holds ``adder``, the other is free."""
    devices.serve("adder", "coder", devices=2)
    devices.join("gpu-1-1", controller="gpu-1", device=1, state="warm", model="")
    return devices


def test_a_load_is_commanded_where_it_displaces_least(two: DeviceYard, looker: Looker) -> None:
    asked = text_of(looker.ask("model.load", {"model": "coder"}))
    assert "coder is to be loaded by gpu-1-1." in asked
    assert two.commands() == []  # asking changes nothing

    entry = looker.do("model.load", {"model": "coder", "why": "a test"})

    [(sent, command)] = two.commands()
    assert (command.verb, command.model, command.why) == ("load", "coder", "a test")
    assert command.worker.startswith("gpu-1-1.")
    assert (entry.action, entry.target, entry.why) == ("model.load", "model coder", "a test")
    assert (entry.who, entry.details["commands"]) == ("olga", sent)


def test_a_load_may_name_its_worker(two: DeviceYard, looker: Looker) -> None:
    entry = looker.do("model.load", {"model": "coder", "worker": "gpu-1-0"})
    [(_, command)] = two.commands()
    assert command.worker.startswith("gpu-1-0.")
    assert entry.target == "model coder on gpu-1-0"
    assert command.why == "requested by olga@board"


def test_a_loaded_model_is_not_loaded_again(two: DeviceYard, looker: Looker) -> None:
    assert "loaded already by gpu-1-0." in text_of(looker.ask("model.load", {"model": "adder"}))
    assert "loaded already" in looker.do("model.load", {"model": "adder"}).text
    assert two.commands() == []


def test_a_load_without_a_place_is_refused_with_what_to_do(
    devices: DeviceYard, looker: Looker
) -> None:
    devices.offer("gpu-1", "adder", "coder")
    worker = devices.join("gpu-1-0", controller="gpu-1")
    devices.connection.xadd(devices.keys.lane(worker), {"id": "busy"})
    assert "no device is free or idle" in text_of(looker.ask("model.load", {"model": "coder"}))
    answer = looker.post("model.load", {"model": "coder"})
    assert answer.status_code in {400, 409}
    assert "no device is free or idle" in answer.text
    assert "no device is free" in looker.audit()[0].error


@pytest.mark.parametrize("action", ALL_ACTIONS)
def test_an_unknown_model_is_refused(two: DeviceYard, looker: Looker, action: str) -> None:
    answer = looker.post(action, {"model": "addr"})
    assert answer.status_code in {400, 409}
    assert "did you mean" in answer.text
    assert two.commands() == []


@pytest.mark.parametrize(
    ("verb", "state", "text"),
    [
        ("unload", "ready", "unloaded"),
        ("sleep", "ready", "go to sleep"),
        ("wake", "asleep", "wake"),
    ],
)
def test_holders_are_commanded(
    devices: DeviceYard, looker: Looker, verb: str, state: str, text: str
) -> None:
    for number in range(3):
        devices.join(f"gpu-1-{number}", controller="gpu-1", device=number, state=state)
    asked = text_of(looker.ask(f"model.{verb}", {"model": "adder"}))
    assert "3 workers" in asked
    assert text in asked

    looker.do(f"model.{verb}", {"model": "adder", "worker": "gpu-1-1"})
    assert [c.worker.partition(".")[0] for _, c in devices.commands()] == ["gpu-1-1"]
    entry = looker.do(f"model.{verb}", {"model": "adder"})
    assert len(entry.details["commands"].split()) == 3
    assert {c.verb for _, c in devices.commands()} == {verb}


def test_a_sleep_has_a_level(two: DeviceYard, looker: Looker) -> None:
    looker.do("model.sleep", {"model": "adder", "level": "2"})
    assert [command.level for _, command in two.commands()] == [2]
    assert looker.post("model.sleep", {"model": "adder", "level": "3"}).status_code == 400


def test_nothing_is_to_be_done_where_nobody_holds_it(two: DeviceYard, looker: Looker) -> None:
    page = looker.get("/do/model.unload", parameters={"model": "coder"})
    assert "no worker holds it" in page
    assert "<form" not in page.partition("<main")[2]
    assert two.commands() == []


def test_the_answer_of_a_worker_is_shown_when_it_comes(two: DeviceYard, looker: Looker) -> None:
    looker.do("model.load", {"model": "coder"})
    [(sent, command)] = two.commands()
    assert "no answer is kept" in looker.get("/model", parameters={"name": "coder"})
    two.answer(sent, command.worker, "out of memory")
    assert "refused out of memory" in text_of(looker.get("/models", parameters={"q": "coder"}))


def test_actions_are_for_operators(two: DeviceYard, looker: Looker) -> None:
    assert {OPERATIONS[name].role for name in ALL_ACTIONS} == {"operator"}
    assert 'action="/board/do/model.unload"' in looker.get("/models", parameters={"q": "a"})


class PlayedReload:
    """Takes the place of `Signals.reload`."""

    def __init__(self) -> None:
        self.outcome: list[Unacknowledged] | Exception = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.asked: tuple[object, ...] = ()

    def __call__(self, *asked: object) -> list[Unacknowledged]:
        self.asked = asked
        assert self.may_end.wait(30)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> PlayedReload:
    played = PlayedReload()
    monkeypatch.setattr(Signals, "reload", played)  # not bound: it gets no `self`
    return played


def test_a_reload_that_ends_soon_says_so(
    two: DeviceYard, looker: Looker, reload: PlayedReload
) -> None:
    asked = text_of(looker.ask("model.reload", {"model": "adder"}))
    assert "the weights are loaded by 1 worker, its epoch becomes 1" in asked
    fields = {"model": "adder", "path": "/new", "mode": "wait", "timeout": "60"}
    entry = looker.do("model.reload", fields)
    assert entry.text == "adder: /new, in epoch 1."
    assert reload.asked == ("adder", "/new", 1, "wait", 60, "olga@board")


def test_a_slow_reload_returns_and_tells_the_audit_how_it_ends(
    two: DeviceYard, looker: Looker, reload: PlayedReload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "_SOON_S", 0.0)
    reload.may_end.clear()
    reload.outcome = [Unacknowledged("gpu-1-0.1", "gpu-1-0", "no such file")]
    entry = looker.do("model.reload", {"model": "adder", "path": "/new", "why": "step 200"})
    assert "it has begun" in entry.text

    reload.may_end.set()

    assert eventually(lambda: len(looker.audit()) == 2)
    ended = looker.audit()[0]
    assert (ended.action, ended.target, ended.why) == ("model.reload", "model adder", "step 200")
    assert "gpu-1-0: no such file; adder is RUNNING" in ended.error


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Invalid("RELOAD_WEIGHTS: not now"), "not now"),
        (BrokerUnavailable("it is away"), "it is away"),
        (ZeroDivisionError("of ours"), "it has failed; the board's log says why"),
        ([Unacknowledged("gpu-1-0.1", "gpu-1-0")], "has not answered after 600 s"),
    ],
)
def test_a_failed_reload_is_refused_with_its_reason(
    two: DeviceYard,
    looker: Looker,
    reload: PlayedReload,
    outcome: list[Unacknowledged] | Exception,
    said: str,
) -> None:
    reload.outcome = outcome
    answer = looker.post("model.reload", {"model": "adder", "path": "/new"})
    assert answer.status_code in {400, 409}
    assert said in text_of(answer.text)
    is_ours = isinstance(outcome, ZeroDivisionError)
    assert ("of ours" if is_ours else said) in looker.audit()[0].error


@pytest.mark.parametrize("fields", [{"mode": "soon"}, {"epoch": "-1"}])
def test_impossible_reloads_do_not_begin(
    two: DeviceYard, looker: Looker, reload: PlayedReload, fields: dict[str, str]
) -> None:
    answer = looker.post("model.reload", {"model": "adder", "path": "/new", **fields})
    assert answer.status_code in {400, 409}
    assert reload.asked == ()


def test_a_reload_without_a_stand_in_pauses_and_reverts(two: DeviceYard, looker: Looker) -> None:
    answer = looker.post("model.reload", {"model": "adder", "path": "/new", "timeout": "1"})
    assert answer.status_code in {303, 400, 409}
    assert eventually(lambda: any("has not answered" in one.error for one in looker.audit()))
    [(_, check)] = two.commands()
    assert (check.verb, check.weights) == ("check", "/new")
    assert re.search("RUNNING", text_of(looker.get("/model", parameters={"name": "adder"})))
