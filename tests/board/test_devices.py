"""The pages of devices: what they show of each, filters, and what they cost."""

from __future__ import annotations

import re

import pytest

from tests.board.device_yard import DeviceYard, keys_asked_for
from tests.board.looking import Looker, text_of
from tests.support.builders import make_request
from tests.support.yard import LONG_MS
from tokenyard.board.operations import OPERATIONS
from tokenyard.board.page import Actor, Parameters
from tokenyard.board.pages import PAGES
from tokenyard.board.pages.devices import MOST_COMMANDS, SAMPLES, TILES
from tokenyard.board.rendering import Templates
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.worker_info import ModelInfo, WorkerTotals
from tokenyard.scripts.answers import Move


def test_a_yard_without_workers_says_so(looker: Looker) -> None:
    text = text_of(looker.get("/devices"))
    assert "No worker has joined this yard" in text
    assert "No model has been placed" in text


def test_a_ready_device_shows_its_figures(devices: DeviceYard, looker: Looker) -> None:
    tally = WorkerTotals(tokens=100, ttft_ms=250.0, temperature_c=61, power_w=305)
    worker = devices.join(
        "gpu-1-0", controller="gpu-1", memory_bytes=3 * 2**30, tally=tally, phases_s={"weights": 2}
    )
    devices.scripts.lead("north", LONG_MS)
    devices.connection.xadd(devices.keys.lane(worker), {"cancel": "1-0"})

    text = text_of(looker.get("/devices"))

    for said in (
        *("1 device of 1 host", "1 ready", "gpu-1 · device 0", "adder", "Running 1 of 4"),
        *("Lane 1 of 6", "First token 250 ms", "Memory 3.0 GiB", "Temperature 61 °C"),
        *("Power 305 W", "Loaded in 2.0 s weights 2.0 s", "Tokens measuring"),
    ):
        assert said in text


def test_what_the_driver_does_not_say_is_left_out(devices: DeviceYard, looker: Looker) -> None:
    devices.join("cpu-0", controller="cpu")
    text = text_of(looker.get("/devices"))
    for absent in ("Temperature", "Power", "Memory", "°C"):
        assert absent not in text


def make_older(redis_url: str, keys: Keys, by_ms: int) -> None:
    """As if the first look at the yard were so much longer ago."""
    seen = SAMPLES._seen[redis_url, keys.yard]
    seen[0] = (seen[0][0] - by_ms, seen[0][1])


def test_tokens_per_second_come_with_the_second_look(
    devices: DeviceYard, looker: Looker, redis_url: str, keys: Keys
) -> None:
    worker = devices.join("gpu-1-0", controller="gpu-1", tally=WorkerTotals(tokens=100))
    assert "Tokens measuring" in text_of(looker.get("/devices"))
    make_older(redis_url, keys, 100_000)
    devices.show(worker, "gpu-1-0", controller="gpu-1", tally=WorkerTotals(tokens=10_100))

    text = text_of(
        looker.get("/devices", parameters={"state": "ready"})
    )  # another filter, another read

    [rate] = re.findall(r"Tokens (\d+)/s", text)
    assert 90 <= int(rate) <= 100


def test_a_loading_device_shows_its_progress(devices: DeviceYard, looker: Looker) -> None:
    now_ms = int(devices.connection.time()[0] * 1000)
    devices.offer("gpu-1", ModelInfo(name="adder", load_s=80.0))
    devices.join("gpu-1-0", controller="gpu-1", state="loading", since_ms=now_ms - 20_000)

    page = looker.get("/devices")

    assert re.search(r"loads for 2\d s; its last load took 80 s", text_of(page))
    assert re.search(r'<progress max="80000" value="2\d{4}"', page)


def test_a_waking_device_is_not_measured_by_a_load(devices: DeviceYard, looker: Looker) -> None:
    devices.offer("gpu-1", ModelInfo(name="adder", load_s=80.0))
    devices.join("gpu-1-0", controller="gpu-1", state="loading", engine_version="0.32")
    page = looker.get("/devices")
    assert "wakes for" in text_of(page)
    assert "<progress" not in page


def test_a_failed_device_shows_its_last_error(devices: DeviceYard, looker: Looker) -> None:
    devices.join("gpu-1-0", controller="gpu-1", state="failed", last_error="out of memory")
    text = text_of(looker.get("/devices"))
    assert "failed" in text
    assert "out of memory" in text


def test_a_group_is_one_tile_that_names_its_members(devices: DeviceYard, looker: Looker) -> None:
    names = ["gpu-1-0", "gpu-1-1"]
    devices.join(names[0], controller="gpu-1", device=0, group=names)
    devices.join(names[1], controller="gpu-1", device=1, group=names, state="attached")
    devices.join("gpu-1-2", controller="gpu-1", device=2, state="warm", model="")

    page = looker.get("/devices")

    text = text_of(page)
    assert page.count('class="tile"') == 2
    assert "gpu-1 · devices 0, 1" in text
    assert "One model on 2 devices: gpu-1-0, gpu-1-1" in text
    assert "gpu-1 · device 2" in text


def test_a_sleeping_spare_is_listed_on_its_device(devices: DeviceYard, looker: Looker) -> None:
    devices.join("gpu-1-0", controller="gpu-1")
    spare = devices.join("gpu-1-0s", controller="gpu-1", state="asleep", model="coder")
    page = looker.get("/devices")
    assert page.count('class="tile"') == 1
    assert f"{spare}: asleep with coder" in text_of(page)
    assert page != looker.get("/devices", parameters={"model": "none"})
    assert 'class="tile"' in looker.get("/devices", parameters={"model": "code"})


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"host": "NORTH"}, ["north-0"]),
        ({"model": "cod"}, ["south-0"]),
        ({"state": "asleep"}, ["south-0"]),
        ({"state": "paused"}, ["north-0"]),
        ({"host": "north", "state": "asleep"}, []),
    ],
)
def test_filters_choose_devices(
    devices: DeviceYard, looker: Looker, filters: dict[str, str], names: list[str]
) -> None:
    devices.join("north-0", controller="north", run_state="PAUSED")
    devices.join("south-0", controller="south", state="asleep", model="coder")

    page = looker.get("/devices", parameters=filters)

    found = re.findall(r'<h2><a href="/board/devices/([^"]*)"', page)
    assert found == names
    assert ("No device fits this filter" in page) == (not names)
    for value in filters.values():
        assert value in page  # the form keeps what was chosen


def test_an_unknown_state_is_refused(looker: Looker) -> None:
    assert "give one of" in looker.get("/devices", parameters={"state": "gone"}, status=400)


def test_the_last_placements_tell_why_and_what_came_of_them(
    devices: DeviceYard, looker: Looker
) -> None:
    worker = devices.join("gpu-1-0", controller="gpu-1")
    looker.do("model.unload", {"model": "adder", "why": "room is needed"})
    [(entry, command)] = devices.commands()
    assert (command.verb, command.worker) == ("unload", worker)
    assert "no answer is kept" in text_of(looker.get("/devices"))

    devices.answer(entry, worker, "it is busy")

    text = text_of(looker.get("/devices", parameters={"page": "1"}))
    assert f"unload {worker} room is needed refused it is busy" in text


def test_a_model_that_no_worker_holds_waits_for_a_reason(
    devices: DeviceYard, looker: Looker
) -> None:
    devices.serve("adder", ModelInfo(name="wide", ranks=9))
    devices.wait_for("wide", 3)
    devices.wait_for("adder", 2)
    text = text_of(looker.get("/devices"))
    assert "wide 3 it takes 9 devices of one host" in text
    assert "adder 2" not in text  # a worker serves it


def test_long_texts_are_cut_with_their_length(devices: DeviceYard, looker: Looker) -> None:
    devices.join("gpu-1-0", controller="gpu-1", state="failed", last_error="x" * 1_000_000)
    for path in ("/devices", "/devices/gpu-1-0"):
        page = looker.get(path)
        assert "(1,000,000 characters)" in page
        assert len(page) < 30_000


def test_unreadable_and_lost_workers_have_tiles(devices: DeviceYard, looker: Looker) -> None:
    devices.join("gpu-1-0", controller="gpu-1")
    devices.connection.hset(devices.keys.workers, "broken.7", b"{")
    devices.connection.zadd(devices.keys.leases, {"broken.7": 2**52, "lost.8": 1})
    text = text_of(looker.get("/devices"))
    assert "broken unreadable" in text
    assert "lost lost" in text
    assert "broken" in looker.get("/devices/broken.7")


# One worker


def test_the_page_of_a_worker_shows_its_entry_and_its_lane(
    devices: DeviceYard, looker: Looker
) -> None:
    token = devices.lead()
    devices.connection.xgroup_create(
        devices.keys.intake("normal"), "coordinator", id="0", mkstream=True
    )
    worker = devices.join(
        "gpu-1-0", controller="gpu-1", engine="vllm", engine_version="0.32", pid=7
    )
    request = make_request("an id / with <b>", model="adder", client="ann")
    (accepted,) = devices.scripts.submit("normal", [request])
    entry = accepted.sid.partition("/")[2]
    devices.scripts.dispatch(
        token, [Move("normal", entry, "ann", request.id, worker, 5, False, "x")]
    )

    for path in ("/devices/gpu-1-0", f"/devices/{worker}"):
        page = looker.get(path)
        text = text_of(page)
        for said in ("Engine vllm 0.32", "Process 7", "Longest lane 6", "Requests at once 4"):
            assert said in text
        assert "an id / with &lt;b&gt;" in page
        assert "client=ann" in page
        assert "1 request; those that its engine runs come first" in text


def test_an_unknown_worker_is_not_found(looker: Looker) -> None:
    assert "There is no worker" in text_of(looker.get("/devices/nobody", status=404))


def test_the_page_of_a_worker_names_its_pauses_and_what_can_be_done(
    devices: DeviceYard, looker: Looker
) -> None:
    devices.join("gpu-1-0", controller="gpu-1")
    assert "/do/signal.pause" in looker.get("/devices/gpu-1-0")
    signals = Signals(devices)
    signals.give(Order(signal="PAUSE", scope="worker:gpu-1-0", by="olga", why="its fan"))

    page = looker.get("/devices/gpu-1-0", parameters={"again": "1"})

    assert re.search(r"worker gpu-1-0 PAUSED for .* by olga: its fan", text_of(page))
    for action in ("signal.unpause", "signal.suspend", "signal.drain", "signal.stop"):
        assert f'action="/board/do/{action}"' in page
    assert 'name="scope" value="worker:gpu-1-0"' in page
    assert "/do/signal.pause" not in page


def test_buttons_lead_to_actions_that_there_are(devices: DeviceYard, looker: Looker) -> None:
    devices.join("gpu-1-0", controller="gpu-1")
    devices.join("gpu-1-0s", controller="gpu-1", state="asleep")
    devices.offer("gpu-1", "adder", "coder")
    found: set[str] = set()
    for path in (
        "/devices",
        "/devices/gpu-1-0",
        "/devices/gpu-1-0s",
        "/models",
        "/model?name=adder",
    ):
        found |= set(re.findall(r'action="/board/do/([^"]*)"', looker.get(path)))
    assert found <= OPERATIONS.keys()
    assert {"signal.pause", "model.load", "model.wake", "model.sleep", "model.unload"} <= found


# What it costs


def test_a_page_of_a_thousand_devices_has_sixty_and_asks_for_few_keys(
    devices: DeviceYard, looker: Looker, redis_url: str, keys: Keys
) -> None:
    devices.join_many(1000)
    devices.lead()
    for model in ("adder", "coder"):
        devices.wait_for(model, 200)

    pages: list[str] = []
    asked = keys_asked_for(redis_url, keys, lambda: pages.append(looker.get("/devices")))

    text = text_of(pages[0])
    assert pages[0].count('class="tile"') == TILES
    assert "1000 devices of 100 hosts: 1,000 ready" in text
    assert "Page 1 of 17" in text
    assert sum(":lane:" in key for key in asked) == TILES
    assert len(asked) <= TILES + MOST_COMMANDS + 80

    last = looker.get("/devices", parameters={"page": "17", "state": "ready"})
    assert last.count('class="tile"') == 1000 - 16 * TILES
    assert "state=ready&amp;page=16" in last


def test_the_page_of_one_of_a_thousand_workers_asks_for_one_lane(
    devices: DeviceYard, looker: Looker, redis_url: str, keys: Keys
) -> None:
    devices.join_many(1000)
    asked = keys_asked_for(redis_url, keys, lambda: looker.get("/devices/host-3-7"))
    assert {key.rpartition(":lane:")[2] for key in asked if ":lane:" in key} == {"host-3-7.1"}
    assert len(asked) <= 40


def test_a_device_without_figures_has_no_empty_list(devices: DeviceYard, looker: Looker) -> None:
    devices.join("gpu-1-0", controller="gpu-1", state="warm", model="")
    assert "<dl" not in looker.get("/devices")


def test_live_blocks_change_only_with_the_yard(
    devices: DeviceYard, looker: Looker, redis_url: str, keys: Keys
) -> None:
    """An open page of a quiet yard is sent nothing."""
    devices.lead()
    devices.offer("gpu-1", ModelInfo(name="adder", load_s=2.0))
    devices.join("gpu-1-0", controller="gpu-1", phases_s={"weights": 2}, since_ms=1)
    for page in (one for one in PAGES if one.path.startswith("/devices")):
        looker.get(page.path.replace("{worker}", "gpu-1-0"))  # the first look has no rates
        make_older(redis_url, keys, 3_000)
        given = Parameters({"worker": ["gpu-1-0"]}, Actor("olga", "operator"))
        yard = Yard(devices.connection, devices.keys, redis_url)
        context = {"root": "/board", "actor": given.actor, "page": page}
        first, second = (
            Templates().live_blocks(page.template, context | page.view(yard, given))
            for _ in range(2)
        )
        assert first
        assert first == second
