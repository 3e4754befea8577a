"""The pages of models."""

from __future__ import annotations

import re

import pytest

from tests.board.device_yard import DeviceYard, keys_asked_for
from tests.board.looking import Looker, text_of
from tokenyard.board.pages.models import MOST_COMMANDS, ROWS
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.worker_info import ModelInfo
from tokenyard.yard import models as waiting_models


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
    Signals(devices).give(Order(signal="SET_GENERATION_EPOCH", scope="model:adder", epoch=7))

    text = text_of(looker.get("/models")).replace("\N{EN DASH}", "-")

    assert "adder 1 adapter 1 ready, 1 asleep 0 12 s 1.5 s 1 its own 7" in text
    assert "coder 1 host cannot load it no such file 2 devices none; 1 host may load it 0 -" in text
    assert "No model has this in its name" in looker.get("/models", parameters={"q": "llama"})
    assert "2 models" in text
    assert "coder" not in text_of(looker.get("/models", parameters={"q": "ADD"}))


def test_each_cell_names_its_column_for_narrow_screens(devices: DeviceYard, looker: Looker) -> None:
    devices.join("gpu-1-0", controller="gpu-1", model="coder")
    devices.offer("gpu-1", ModelInfo(name='"><td data-label="a">'), ModelInfo(name="coder"))

    table, _, _ = looker.get("/models").partition("</table>")

    named = re.findall(r'<t[hd][^>]* data-label="([^"]*)"', table)
    columns = re.findall(r'<th scope="col"[^>]*>([^<]*)<', table)
    assert "Actions" in columns
    assert named == 2 * columns


def test_the_page_of_a_model_tells_who_waits_and_why(devices: DeviceYard, looker: Looker) -> None:
    devices.serve(ModelInfo(name="coder", fault="bad file", faults=3, faulted_ms=2**43))
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
        signals = Signals(devices)
        signals.give(Order(signal="PAUSE", scope="model:coder"))
    if case == "commanded":
        fields = {"model": "coder", "worker": "gpu-1-0", "why": "the test wants it"}
        looker.do("model.load", fields)
    if case == "nowhere":  # or nobody would know it
        Signals(devices).give(Order(signal="SET_GENERATION_EPOCH", scope="model:coder", epoch=1))
    devices.wait_for("coder", 1)
    assert re.search(why, text_of(looker.get("/model", parameters={"name": "coder"})))


def test_a_command_without_an_answer_explains_a_wait_for_a_time(
    devices: DeviceYard, looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.serve("adder", "coder")
    looker.do("model.load", {"model": "coder", "worker": "gpu-1-0"})
    devices.wait_for("coder", 1)
    monkeypatch.setattr(waiting_models, "_PATIENCE_MS", -1)
    text = text_of(looker.get("/model", parameters={"name": "coder"}))
    assert "was told" not in text
    assert "no device is free or idle" in text


def test_a_model_whose_hosts_are_gone_is_listed(devices: DeviceYard, looker: Looker) -> None:
    devices.lead()
    devices.offer("gone", ModelInfo(name="coder", fault="bad file", faults=2, adapters=["lora"]))
    devices.wait_for("coder", 1)

    assert "bad file 1 adapter none; its hosts are not there" in text_of(looker.get("/models"))

    text = text_of(looker.get("/model", parameters={"name": "coder"}))
    assert "no host that may load it is there: start one" in text
    assert "No host that may load it is there; the last that was" in text
    assert "2 times in a row" in text


def test_an_unknown_model_is_not_found(looker: Looker) -> None:
    assert "There is no model" in text_of(
        looker.get("/model", parameters={"name": "nope"}, status=404)
    )


def test_what_waits_is_labelled_as_a_sample(devices: DeviceYard, looker: Looker) -> None:
    devices.serve("adder", "coder")
    devices.wait_for("coder", 100)
    text = text_of(looker.get("/models"))
    assert "of 100 waiting requests the oldest 25 are counted by model" in text
    assert "may load it ≥ 25" in text
    assert "at least 25 requests" in text_of(looker.get("/model", parameters={"name": "coder"}))


def test_fewer_long_requests_are_read(devices: DeviceYard, looker: Looker) -> None:
    devices.serve("adder", "coder")
    devices.wait_for("coder", 100, tokens=range(10_000))
    assert "of 100 waiting requests the oldest 2 are counted" in text_of(looker.get("/models"))


def test_tenants_in_line_are_in_the_sample(devices: DeviceYard, looker: Looker) -> None:
    devices.serve("coder")
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

    assert pages["/models"].count('scope="row"') == ROWS
    assert "1,000 ready" in text_of(pages["/models"])
    assert "Page 1 of 3" in text_of(pages["/models"])
    assert "The first 60 of 1,000" in text_of(pages["/model?name=adder"])
    assert "model-119" in looker.get("/models", parameters={"page": "3"})


def test_an_epoch_is_set_from_the_page_of_a_model(devices: DeviceYard, looker: Looker) -> None:
    devices.serve("adder")
    page = looker.get("/model", parameters={"name": "adder"})
    assert 'action="/board/do/signal.epoch"' in page
    scope = {"scope": "model:adder"}
    assert 'name="epoch" value="1"' in looker.ask("signal.epoch", scope)
    assert looker.post("signal.epoch", scope).status_code == 400  # without a number

    entry = looker.do("signal.epoch", {**scope, "epoch": "7"})

    assert entry.text == "model adder: SET_GENERATION_EPOCH is given."
    assert entry.details["epoch"] == "7"
    assert Signals(devices).desired_states().by_scope["model:adder"].epoch == 7
