"""The pages of models, and what operators can do there."""

from __future__ import annotations

import re
import threading

import pytest

from tests.board.device_yard import DeviceYard, keys_asked_for
from tests.board.looking import Looker, text_of
from tests.support.waiting import eventually
from tokenyard.admin import waiting_models
from tokenyard.admin.signals import Signals, Unacknowledged
from tokenyard.board import model_reload
from tokenyard.board.pages import ACTIONS
from tokenyard.board.pages.models import MOST_COMMANDS, ROWS
from tokenyard.board.yard import Actor
from tokenyard.protocol.control import Invalid, Order
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.worker_info import ModelInfo

HOSTILE = '"><img src=x onerror=alert(1)>\u202e'
ALL_ACTIONS = ("model.load", "model.unload", "model.sleep", "model.wake", "model.reload")


def test_a_yard_without_models_says_so(looker: Looker) -> None:
    text = text_of(looker.get("/models"))
    assert "No models: no host is live" in text
    assert "No model has been placed" in text


def test_models_are_listed_with_workers_costs_and_faults(
    devices: DeviceYard, looker: Looker
) -> None:
    devices.join("gpu-1-0", controller="gpu-1")
    devices.join("gpu-1-0s", controller="gpu-1", state="asleep")
    offers = [
        ModelInfo(name="adder", load_s=12.34, swap_s=1.5, pin=1, adapters=["lora"]),
        ModelInfo(name="coder", fault="no such file", faults=2, faulted_ms=1, ranks=2),
    ]
    devices.offer("gpu-1", *offers)
    Signals(devices.connection, devices.keys).give(
        Order(signal="SET_GENERATION_EPOCH", scope="model:adder", epoch=7)
    )

    text = text_of(looker.get("/models")).replace("\N{EN DASH}", "-")

    assert "adder 1 adapter 1 ready, 1 asleep 0 12 s 1.5 s 1 its own 7" in text
    assert (
        "coder 1 host cannot load it 2 devices none; 1 host may load it 0 - - - its own -" in text
    )
    assert "No model has this in its name" in looker.get("/models", parameters={"q": "llama"})
    assert "2 models" in text
    assert "coder" not in text_of(looker.get("/models", parameters={"q": "ADD"}))


def test_the_page_of_a_model_tells_who_waits_and_why(devices: DeviceYard, looker: Looker) -> None:
    devices.lead()
    devices.join("gpu-1-0", controller="gpu-1")
    devices.offer("gpu-1", ModelInfo(name="coder", fault="bad file", faults=3, faulted_ms=2**43))
    devices.wait_for("coder", 3)

    text = text_of(looker.get("/model", parameters={"name": "coder"}))

    assert "Waiting 3 requests, the oldest for" in text
    assert "could not be loaded, 3 times in a row on gpu-1: bad file" in text
    assert "3 times in a row, last" in text
    assert "No worker holds it." in text


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("leaderless", "no coordinator leads the yard"),
        ("paused", "model coder PAUSED"),
        ("loading", "gpu-1-0 has been loading it"),
        ("commanded", r"gpu-1-0 was told \S+ s ago to load it: the test wants it"),
        ("nowhere", "no live host may load it"),
        ("busy", "no device is free or idle"),
    ],
)
def test_reasons_for_waiting(devices: DeviceYard, looker: Looker, case: str, why: str) -> None:
    state = "loading" if case == "loading" else "ready"
    model = "coder" if case in {"loading", "paused"} else "adder"
    devices.join("gpu-1-0", controller="gpu-1", state=state, model=model)
    devices.offer("gpu-1", "adder", *([] if case == "nowhere" else ["coder"]))
    if case != "leaderless":
        devices.lead()
    if case == "paused":
        signals = Signals(devices.connection, devices.keys)
        signals.give(Order(signal="PAUSE", scope="model:coder"))
    if case == "commanded":
        fields = {"model": "coder", "worker": "gpu-1-0", "why": "the test wants it"}
        looker.do("model.load", fields)
    if case == "nowhere":  # or nobody would know it
        Signals(devices.connection, devices.keys).give(
            Order(signal="SET_GENERATION_EPOCH", scope="model:coder", epoch=1)
        )
    devices.wait_for("coder", 1)
    assert re.search(why, text_of(looker.get("/model", parameters={"name": "coder"})))


def test_a_command_without_an_answer_explains_a_wait_for_a_time(
    devices: DeviceYard, looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.join("gpu-1-0", controller="gpu-1")
    devices.offer("gpu-1", "adder", "coder")
    devices.lead()
    looker.do("model.load", {"model": "coder", "worker": "gpu-1-0"})
    devices.wait_for("coder", 1)
    monkeypatch.setattr(waiting_models, "_PATIENCE_MS", -1)
    text = text_of(looker.get("/model", parameters={"name": "coder"}))
    assert "was told" not in text
    assert "no device is free or idle" in text


def test_an_unknown_model_is_not_found(looker: Looker) -> None:
    assert "There is no model" in text_of(
        looker.get("/model", parameters={"name": "nope"}, status=404)
    )


def test_what_waits_is_labelled_as_a_sample(devices: DeviceYard, looker: Looker) -> None:
    devices.lead()
    devices.offer("gpu-1", "adder", "coder")
    devices.join("gpu-1-0", controller="gpu-1")
    devices.wait_for("coder", 100)
    text = text_of(looker.get("/models"))
    assert "of 100 waiting requests the oldest 25 are counted by model" in text
    assert "may load it ≥ 25" in text
    assert "at least 25 requests" in text_of(looker.get("/model", parameters={"name": "coder"}))


def test_fewer_long_requests_are_read(devices: DeviceYard, looker: Looker) -> None:
    devices.lead()
    devices.offer("gpu-1", "adder", "coder")
    devices.join("gpu-1-0", controller="gpu-1")
    devices.wait_for("coder", 100, tokens=range(10_000))
    assert "of 100 waiting requests the oldest 2 are counted" in text_of(looker.get("/models"))


def test_tenants_in_line_are_in_the_sample(devices: DeviceYard, looker: Looker) -> None:
    devices.lead()
    devices.offer("gpu-1", "coder")
    devices.join("gpu-1-0", controller="gpu-1")
    devices.wait_for("coder", 3, tenant="acme")
    assert "Waiting 3 requests" in text_of(looker.get("/model", parameters={"name": "coder"}))


def test_a_thousand_workers_ask_for_few_keys(
    devices: DeviceYard, looker: Looker, redis_url: str, keys: Keys
) -> None:
    devices.join_many(1000)
    devices.lead()
    devices.offer("host-1", *(f"model-{n:03}" for n in range(120)))
    devices.wait_for("adder", 200)

    pages: dict[str, str] = {}
    for path in ("/models", "/model?name=adder"):
        asked = keys_asked_for(
            redis_url, keys, lambda path=path: pages.update({path: looker.get(path)})
        )
        assert not any(":lane:" in key for key in asked)
        assert len(asked) <= MOST_COMMANDS + 80

    assert pages["/models"].count('<th scope="row">') == ROWS
    assert "1,000 ready" in text_of(pages["/models"])
    assert "Page 1 of 3" in text_of(pages["/models"])
    assert "The first 60 of 1,000" in text_of(pages["/model?name=adder"])
    assert "model-119" in looker.get("/models", parameters={"page": "3"})


def test_hostile_names_are_shown_as_text(devices: DeviceYard, looker: Looker) -> None:
    offer = ModelInfo(name=HOSTILE, fault=HOSTILE, faults=1, faulted_ms=1, adapters=[HOSTILE])
    devices.join("gpu-1-0", controller="gpu-1", model=HOSTILE, weights=HOSTILE)
    devices.offer("gpu-1", offer)
    asking = looker.get("/do/model.unload", parameters={"model": HOSTILE})
    for page in (
        looker.get("/models"),
        looker.get("/model", parameters={"name": HOSTILE}),
        asking,
    ):
        assert "<img" not in page
        assert "\u202e" not in text_of(page)
    assert looker.post("model.unload", {"model": HOSTILE}).status_code == 303
    assert looker.audit()[0].target == f"model {HOSTILE}"


# Actions


@pytest.fixture
def two(devices: DeviceYard) -> DeviceYard:
    """Two devices of a host that may load two models; one holds ``adder``, the other is free."""
    devices.lead()
    devices.offer("gpu-1", "adder", "coder", devices=2)
    devices.join("gpu-1-0", controller="gpu-1")
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
    assert (entry.who, entry.details) == ("olga", {"commands": sent})


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
@pytest.mark.parametrize("fields", [{"model": "addr"}, {"model": "adder", "worker": "gpu-1-9"}])
def test_unknown_names_are_refused(
    two: DeviceYard, looker: Looker, action: str, fields: dict[str, str]
) -> None:
    answer = looker.post(action, fields)
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
    assert {ACTIONS[name].role for name in ALL_ACTIONS} == {"operator"}
    looker.actor = Actor("olga", "viewer")
    for action in ALL_ACTIONS:
        assert looker.post(action, {"model": "adder", "path": "/new"}).status_code == 403
        looker.get(f"/do/{action}", parameters={"model": "adder"}, status=403)
    assert two.commands() == []
    looker.actor = Actor("olga", "operator")
    assert 'action="/board/do/model.unload"' in looker.get("/models", parameters={"q": "a"})


# Reloads


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
    monkeypatch.setattr(model_reload, "_SOON_S", 0.0)
    reload.may_end.clear()
    reload.outcome = [Unacknowledged("gpu-1-0.1", "gpu-1-0", "no such file")]
    entry = looker.do("model.reload", {"model": "adder", "path": "/new", "why": "step 200"})
    assert "The reload has begun" in entry.text

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
    assert said in looker.audit()[0].error


@pytest.mark.parametrize(
    "fields", [{"path": "new"}, {"path": "/new", "mode": "soon"}, {"path": "/new", "epoch": "-1"}]
)
def test_impossible_reloads_do_not_begin(
    two: DeviceYard, looker: Looker, reload: PlayedReload, fields: dict[str, str]
) -> None:
    answer = looker.post("model.reload", {"model": "adder", **fields})
    assert answer.status_code in {400, 409}
    assert reload.asked == ()


def test_a_reload_without_a_stand_in_pauses_and_reverts(two: DeviceYard, looker: Looker) -> None:
    answer = looker.post("model.reload", {"model": "adder", "path": "/new", "timeout": "1"})
    assert answer.status_code in {303, 400, 409}
    assert eventually(lambda: any("has not answered" in one.error for one in looker.audit()))
    [(_, check)] = two.commands()
    assert (check.verb, check.weights) == ("check", "/new")
    assert re.search("RUNNING", text_of(looker.get("/model", parameters={"name": "adder"})))
