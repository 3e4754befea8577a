"""The placement in any situation: what it must never do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.placement.decide import PendingLoad, Situation, place
from coordinator.placement.devices import AWAKE, SERVING, Worker
from coordinator.placement.needs import Demand
from tests.support.effort import examples
from tests.support.situations import NOW_MS, WAIT_S
from tokenyard.protocol.control import Command
from tokenyard.protocol.worker_info import (
    WORKER_STATES,
    HostInfo,
    ModelInfo,
    WorkerInfo,
    WorkerState,
)

MODELS = ("a", "b", "c", "pair")
RANKS = {"pair": 2}

seconds = st.sampled_from([0, 1, 29, 31, 200])
waits = st.sampled_from([0, 29, 31, 200, 200])


@st.composite
def workers(draw: st.DrawFn, controller: str, devices: int) -> list[Worker]:
    """The processes of one host: on each device one that may be awake, and spares."""
    found, index = [], 0
    while index < devices:
        if index + 1 < devices and draw(st.booleans()):
            names = [f"{controller}{index}", f"{controller}{index + 1}"]
            found.append(draw(process(names[0], controller, index, "awake", "pair", names)))
            found.append(draw(process(names[1], controller, index + 1, "attached", "pair", names)))
            index += 2
            continue
        kind = draw(st.sampled_from([*["awake"] * 5, "warm", "warming", "failed"]))
        model = draw(st.sampled_from("abc"))
        found.append(draw(process(f"{controller}{index}", controller, index, kind, model)))
        for at, spare in enumerate(draw(st.lists(st.sampled_from(["warm", "asleep"]), max_size=2))):
            name = f"{controller}{index}-spare{at}"
            found.append(
                draw(process(name, controller, index, spare, draw(st.sampled_from("abc"))))
            )
        index += 1
    return found


@st.composite
def process(
    draw: st.DrawFn,
    name: str,
    controller: str,
    device: int,
    kind: Any,
    model: str,
    group: Sequence[str] = (),
) -> Worker:
    states: Any = ["ready", "ready", "ready", "ready", "loading", "draining", "unloading"]
    state = draw(st.sampled_from(states)) if kind == "awake" else kind
    info = WorkerInfo(
        name=name,
        state=state,
        model=model if state in AWAKE | {"asleep"} else "",
        controller=controller,
        device=device,
        group=list(group),
        lane_limit=4 if state == "ready" else 2,
        since_ms=int(NOW_MS - 1000 * draw(seconds)),
        swapped_ms=int(NOW_MS - 1000 * draw(seconds)) if draw(st.booleans()) else 0,
    )
    load = draw(st.integers(0, 4)) if state in {"ready", "draining"} else 0
    return Worker(f"{name}.1", info, load, NOW_MS - 1000 * draw(seconds))


@st.composite
def offers(draw: st.DrawFn) -> ModelInfo:
    model = draw(st.sampled_from(MODELS))
    faults = draw(st.sampled_from([0, 0, 0, 0, 0, 1, 3]))
    return ModelInfo(
        name=model,
        ranks=RANKS.get(model, 1),
        pin=draw(st.sampled_from([0, 0, 1, 2])),
        load_s=draw(st.sampled_from([0.0, 5.0, 50.0])),
        fault="broken" if faults else "",
        faults=faults,
        faulted_ms=int(NOW_MS - 1000 * draw(seconds)) if faults else 0,
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    hosts, everybody = {}, []
    for controller in draw(st.sampled_from(["h", "hi"])):
        devices = draw(st.integers(1, 4))
        models = draw(st.lists(offers(), min_size=2, unique_by=lambda one: one.name))
        hosts[controller] = HostInfo(name=controller, devices=devices, models=models)
        everybody += draw(workers(controller, devices))
    demands = [
        Demand(model, draw(st.integers(0, 20)), 0, draw(waits))
        for model in draw(st.lists(st.sampled_from([*MODELS, "unknown"]), min_size=2, unique=True))
    ]
    return Situation(demands, everybody, hosts, NOW_MS, WAIT_S, draw(pending_loads(everybody)))


@st.composite
def pending_loads(draw: st.DrawFn, everybody: Sequence[Worker]) -> list[PendingLoad]:
    alone = [one for one in everybody if not one.info.group and one.info.state in AWAKE | {"warm"}]
    most = draw(st.sampled_from([0, 0, 2]))
    chosen = draw(st.lists(st.sampled_from(alone), max_size=most)) if alone else []
    by_device = {one.device: one for one in chosen}
    return [
        PendingLoad(
            Command(verb="load", worker=one.worker, model=draw(st.sampled_from("abc"))),
            [device],
            NOW_MS - 1000 * draw(seconds),
        )
        for device, one in by_device.items()
    ]


def devices_of(situation: Situation, command: Command) -> set[tuple[str, int]]:
    (worker,) = [one for one in situation.workers if one.worker == command.worker]
    indices = command.devices or [worker.info.device]
    assert indices[0] == worker.info.device
    return {(worker.info.controller, index) for index in indices}


def awake_on(situation: Situation, device: tuple[str, int]) -> list[Worker]:
    there = [one for one in situation.workers if one.device == device]
    return [one for one in there if one.info.state in AWAKE]


def leader_on(situation: Situation, device: tuple[str, int]) -> Worker | None:
    """The worker that occupies a device, itself or by its group."""
    for one in awake_on(situation, device):
        if one.info.state != "attached":
            return one
        leaders = [mate for mate in situation.workers if mate.info.name == one.info.group[0]]
        return leaders[0]
    return None


def serving(situation: Situation, without: Sequence[Worker] = ()) -> Counter[str]:
    names = {one.worker for one in without}
    return Counter(
        one.info.model
        for one in situation.workers
        if one.info.state in SERVING and one.worker not in names
    )


@given(situations())
def test_no_device_and_no_model_is_given_twice(situation: Situation) -> None:
    placement = place(situation)

    given = [device for one in placement.pending for device in one.devices]
    assert len(given) == len(set(given))
    models = [command.model for command in placement.commands]
    assert len(models) == len(set(models))
    for command in placement.commands:
        assert devices_of(situation, command) <= set(given)


@given(situations())
def test_only_listed_models_are_loaded_and_on_as_many_devices_as_they_need(
    situation: Situation,
) -> None:
    for command in place(situation).commands:
        devices = devices_of(situation, command)
        (controller,) = {name for name, _ in devices}
        (info,) = [one for one in situation.hosts[controller].models if one.name == command.model]
        assert len(devices) == info.ranks
        pause_s = min(2**info.faults, 60) if info.faults else 0
        assert NOW_MS - info.faulted_ms >= 1000 * pause_s


@pytest.mark.long
def test_only_ready_workers_give_way_and_only_when_they_may() -> None:
    busy = 0

    @given(situations())
    @settings(max_examples=examples(200, deep=800))
    def check(situation: Situation) -> None:
        nonlocal busy
        demands = {one.model: one for one in situation.demands if one.requests}
        for command in place(situation).commands:
            for device in devices_of(situation, command):
                leader = leader_on(situation, device)
                if leader is None:
                    continue
                assert leader.info.state == "ready"
                assert leader.info.model != command.model
                assert NOW_MS - leader.info.swapped_ms >= 1000 * WAIT_S
                if leader.load or leader.info.model in demands:
                    busy += 1
                    assert demands[command.model].oldest_wait_s >= WAIT_S
                    assert not serving(situation)[command.model] or situation.pending

    check()
    assert busy, "no situation in which a busy worker gives way"


@given(situations())
def test_pinned_models_keep_their_workers(situation: Situation) -> None:
    situation = replace(situation, pending=[])
    gone = [
        leader
        for command in place(situation).commands
        for device in devices_of(situation, command)
        if (leader := leader_on(situation, device))
    ]
    before, after = serving(situation), serving(situation, gone)
    for host in situation.hosts.values():
        for info in host.models:
            assert after[info.name] >= min(info.pin, before[info.name])


@given(situations())
def test_a_waiting_model_gets_a_free_device_where_there_is_one(situation: Situation) -> None:
    placement = place(situation)
    given = {device for one in placement.pending for device in one.devices}
    loaded = {one.command.model for one in placement.pending} | set(serving(situation))
    gathers = any(one.model == "pair" and one.oldest_wait_s >= WAIT_S for one in situation.demands)
    for demand in situation.demands:
        if demand.requests and demand.model not in {*loaded, "pair"} and not gathers:
            free = [
                one.device
                for one in situation.workers
                if one.info.state == "warm"
                and not awake_on(situation, one.device)
                and one.device not in given
                and can_load(situation, one.info.controller, demand.model)
            ]
            assert free == []


def can_load(situation: Situation, controller: str, model: str) -> bool:
    infos = [one for one in situation.hosts[controller].models if one.name == model]
    return any(
        not one.faults or NOW_MS - one.faulted_ms >= 1000 * min(2**one.faults, 60) for one in infos
    )


@pytest.mark.long
def test_a_second_decision_adds_nothing_to_pending_loads() -> None:
    added = 0

    @given(st.one_of(situations(), situations().map(pinned)))
    @settings(max_examples=examples(200, deep=1600))
    def check(situation: Situation) -> None:
        nonlocal added
        first = place(situation)

        again = place(replace(situation, pending=first.pending))

        added += len(again.commands)
        ordered = {device for one in first.pending for device in one.devices}
        for command in again.commands:
            assert not devices_of(situation, command) & ordered
            assert command.model not in {one.model for one in first.commands} or is_growth(
                situation, command.model
            )

    check()
    assert added, "no situation in which there is more to order"


def pinned(situation: Situation) -> Situation:
    """The same, with two workers pinned of each model: there is more to do than one decision."""
    hosts = {
        name: msgspec.structs.replace(
            host, models=[msgspec.structs.replace(one, pin=2) for one in host.models]
        )
        for name, host in situation.hosts.items()
    }
    return replace(situation, hosts=hosts)


def is_growth(situation: Situation, model: str) -> bool:
    """Whether a model may get several workers one after the other."""
    pins = max(one.pin for host in situation.hosts.values() for one in host.models)
    return bool(serving(situation)[model]) or pins > 1


@given(situations())
def test_hopeless_models_have_requests_and_no_worker(situation: Situation) -> None:
    placement = place(situation)

    wanted = {one.model for one in situation.demands if one.requests}
    assert set(placement.hopeless) <= wanted
    assert not set(placement.hopeless) & {one.command.model for one in placement.pending}
    assert all(placement.hopeless.values())


def test_every_worker_state_is_covered() -> None:
    """A new state of workers must be considered in the placement."""
    known = AWAKE | frozenset[WorkerState]({"warming", "warm", "asleep", "failed"})

    assert known == set(WORKER_STATES)
