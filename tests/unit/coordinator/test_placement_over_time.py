"""The placement in a made-up yard whose clock the test turns: swaps, waits and throughput."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise
from typing import Final

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from coordinator.placement.decide import PendingLoad, Situation, place
from coordinator.placement.devices import Worker
from coordinator.placement.needs import Demand
from tests.support.effort import examples
from tokenyard.protocol.commands import Command
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerInfo, WorkerState

STEP_S: Final = 0.05
START_MS: Final = 1_000_000.0
UNLOAD_S: Final = 0.2


@dataclass
class Model:
    """How a model behaves here."""

    name: str
    load_s: float = 1.0
    rate: float = 20.0  # requests that one worker answers in a second
    ranks: int = 1
    pin: int = 0


@dataclass
class PlacementDevice:
    """One device and its two processes, one of which may be awake."""

    index: int
    state: WorkerState = "warm"
    model: str = ""
    group: list[int] = field(default_factory=list)  # devices, the leader's first
    incarnation: int = 1
    lane: deque[float] = field(default_factory=deque)  # when its requests were submitted
    since_s: float = 0.0
    swapped_s: float = 0.0
    worked_s: float = 0.0
    credit: float = 0.0  # of requests, that the engine has worked off
    wanted: str = ""
    wanted_group: list[int] = field(default_factory=list)

    @property
    def worker(self) -> str:
        return f"w{self.index}.{self.incarnation}"

    def enter(self, state: WorkerState, now_s: float) -> None:
        self.state, self.since_s = state, now_s


class Yard:
    """One host, a queue for each model, and the placement every step."""

    def __init__(self, models: list[Model], devices: int, wait_s: float = 5.0) -> None:
        self.models = {model.name: model for model in models}
        self.devices = [PlacementDevice(index) for index in range(devices)]
        self.wait_s = wait_s
        self.lane_limit = 5
        self.now_s = 0.0
        self.queues: dict[str, deque[float]] = {name: deque() for name in self.models}
        self.pending: list[PendingLoad] = []
        self.commands: list[Command] = []
        self.swaps: list[tuple[float, int]] = []  # when, and on which device
        self.lost_s: Counter[int] = Counter()  # by device: unloading and loading after a swap
        self.measured: set[str] = set()  # models that were loaded
        self.served: Counter[str] = Counter()
        self.longest_wait_s = 0.0

    def submit(self, *models: str) -> None:
        for model in models:
            self.queues[model].append(self.now_s)

    def run(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.step()

    def run_until_served(self, count: int, most_s: float = 3_000.0) -> None:
        until = self.now_s + most_s
        while self.served.total() < count:
            assert self.now_s < until, f"{self.served}, {self.devices}"
            self.step()

    def step(self) -> None:
        self.now_s += STEP_S
        for device in self.devices:
            self._dispatch(device)
        self._place()
        for device in self.devices:
            if device.swapped_s and device.state in {"unloading", "warm", "loading"}:
                self.lost_s[device.index] += STEP_S
            self._serve(device)
            self._move_on(device)
        self._take_up()

    def _dispatch(self, device: PlacementDevice) -> None:
        queue = self.queues.get(device.model, deque())
        while device.state == "ready" and queue and len(device.lane) < self.lane_limit:
            device.lane.append(queue.popleft())

    def _serve(self, device: PlacementDevice) -> None:
        if device.state not in {"ready", "draining"} or not device.lane:
            device.credit = 0.0
            return
        device.worked_s = self.now_s
        device.credit += self.models[device.model].rate * STEP_S
        while device.credit >= 1 and device.lane:
            device.credit -= 1
            self.longest_wait_s = max(self.longest_wait_s, self.now_s - device.lane.popleft())
            self.served[device.model] += 1

    # The controller

    def _obey(self, command: Command) -> None:
        devices = [one for one in self.devices if one.worker == command.worker]
        assert len(devices) == 1, f"{command} is for nobody"
        group = command.devices or [devices[0].index]
        for index in group:
            self.devices[index].wanted = command.model
            self.devices[index].wanted_group = group
            for mate in self.devices[index].group or [index]:
                self._release(self.devices[mate])

    def _release(self, device: PlacementDevice) -> None:
        if device.state == "ready":
            device.enter("draining", self.now_s)

    def _move_on(self, device: PlacementDevice) -> None:
        elapsed_s = self.now_s - device.since_s
        if device.state == "draining" and not device.lane:
            mates = [self.devices[index] for index in device.group or [device.index]]
            is_swap = any(mate.wanted for mate in mates)
            for mate in mates:
                self._give_way(mate, is_swap=is_swap)
        elif device.state == "unloading" and elapsed_s >= UNLOAD_S:
            device.model, device.group = "", []
            device.enter("warm", self.now_s)
        elif device.state == "loading" and elapsed_s >= self.models[device.model].load_s:
            device.enter("ready", self.now_s)
            self.measured.add(device.model)

    def _give_way(self, device: PlacementDevice, *, is_swap: bool) -> None:
        device.enter("unloading", self.now_s)
        device.incarnation += 100
        if is_swap:
            device.swapped_s = self.now_s
            self.swaps.append((self.now_s, device.index))

    def _take_up(self) -> None:
        for device in self.devices:
            mates = [self.devices[index] for index in device.wanted_group]
            if mates and mates[0] is device and all(mate.state == "warm" for mate in mates):
                for mate in mates:
                    mate.model, mate.wanted = device.wanted or mate.model, ""
                    mate.group = [one.index for one in mates] if len(mates) > 1 else []
                    mate.wanted_group = []
                    mate.enter("loading" if mate is device else "attached", self.now_s)

    # The coordinator

    def _place(self) -> None:
        placement = place(
            Situation(
                self._demands(),
                [self._worker(device) for device in self.devices],
                {"h": self._host()},
                self._ms(self.now_s),
                self.wait_s,
                self.pending,
            )
        )
        self.pending = placement.pending
        self.commands += placement.commands
        for command in placement.commands:
            self._obey(command)

    def _demands(self) -> list[Demand]:
        return [
            Demand(model, len(queue), len(queue), self.now_s - queue[0])
            for model, queue in self.queues.items()
            if queue
        ]

    def _worker(self, device: PlacementDevice) -> Worker:
        info = WorkerInfo(
            name=f"w{device.index}",
            state=device.state,
            model=device.model,
            controller="h",
            device=device.index,
            lane_limit=self.lane_limit if device.state == "ready" else 2,
            group=[f"w{index}" for index in device.group],
            since_ms=int(self._ms(device.since_s)),
            swapped_ms=int(self._ms(device.swapped_s)) if device.swapped_s else 0,
        )
        return Worker(device.worker, info, len(device.lane), self._ms(device.worked_s))

    def _host(self) -> HostInfo:
        models = [
            ModelInfo(
                name=one.name,
                ranks=one.ranks,
                pin=one.pin,
                load_s=one.load_s if one.name in self.measured else 0.0,
                swap_s=one.load_s + UNLOAD_S if one.name in self.measured else 0.0,
            )
            for one in self.models.values()
        ]
        return HostInfo(name="h", devices=len(self.devices), models=models)

    @staticmethod
    def _ms(seconds: float) -> float:
        return START_MS + 1000 * seconds

    @property
    def granularity_s(self) -> float:
        """By how much more the swaps take than they should, since time goes in steps."""
        return 3 * STEP_S * len(self.swaps)

    def shortest_time_between_swaps(self) -> float:
        """Of one device."""
        times = [
            round(after - before, 3)
            for device in self.devices
            for before, after in pairwise(at for at, index in self.swaps if index == device.index)
        ]
        return min(times, default=float("inf"))


def alternating(count: int, *models: str) -> list[str]:
    return list(islice(cycle(models), count))


def test_a_thousand_alternating_requests_at_once_on_one_device() -> None:
    """I expect few swaps, and at least 70 % of the throughput of one model alone."""
    alone = Yard([Model("a")], devices=1)
    alone.submit(*["a"] * 1000)
    alone.run_until_served(1000)

    yard = Yard([Model("a"), Model("b")], devices=1)
    yard.submit(*alternating(1000, "a", "b"))
    yard.run_until_served(1000)

    assert yard.served == {"a": 500, "b": 500}
    assert len(yard.swaps) <= 1 + yard.now_s / yard.wait_s
    assert alone.now_s / yard.now_s >= 0.7


def test_alternating_requests_that_keep_coming_do_not_thrash() -> None:
    """Given a device that is idle between two requests, I expect batches of each model still."""
    yard = Yard([Model("a"), Model("b")], devices=1)
    for model in alternating(200, "a", "b"):
        yard.submit(model)
        yard.run(0.5)
    yard.run_until_served(200)

    assert yard.shortest_time_between_swaps() >= yard.wait_s
    assert yard.longest_wait_s <= 2 * yard.wait_s


def test_a_growing_queue_gets_all_devices_and_gives_one_back() -> None:
    yard = Yard([Model("a"), Model("b")], devices=4)
    yard.submit(*["a"] * 3000)
    yard.run(10.0)
    assert [device.model for device in yard.devices] == ["a"] * 4

    yard.submit("b")
    yard.run(yard.wait_s + 3.0)

    assert yard.served["b"] == 1
    assert Counter(device.model for device in yard.devices)["b"] == 1


def test_a_pinned_model_is_there_before_its_first_request_and_stays() -> None:
    yard = Yard([Model("a", pin=1), Model("b"), Model("c")], devices=2)
    yard.run(3.0)
    assert Counter(device.model for device in yard.devices)["a"] == 1

    yard.submit(*alternating(600, "b", "c"))
    while yard.served.total() < 600:
        yard.step()
        assert any(one.model == "a" and one.state == "ready" for one in yard.devices)


def test_a_group_gets_its_devices_among_models_that_swap_all_the_time() -> None:
    models = [Model(name) for name in "abcd"]
    yard = Yard([Model("big", ranks=2), *models], devices=2)
    for _ in range(60):
        yard.submit(*"abcd")
        yard.run(0.5)
    yard.submit("big")
    for _ in range(200):
        yard.submit(*"abcd")
        yard.run(0.5)

    assert yard.served["big"] == 1


class TestTurnsByCost:
    """No wait is set: turns follow from the cost of swaps."""

    @pytest.mark.parametrize("load_s", [0.1, 5.0])
    def test_small_models_take_quick_turns_and_large_ones_slow_ones(self, load_s: float) -> None:
        """Given twice the load of a device, I expect both served and a tenth lost at most."""
        yard = Yard([Model("a", load_s), Model("b", load_s)], devices=1, wait_s=0.0)
        for _ in range(400):
            yard.submit(*["a"] * 10, *["b"] * 10)
            yard.run(0.5)

        turn_s = (load_s + UNLOAD_S) / 0.1
        assert min(yard.served.values()) > 0.4 * yard.served.total(), yard.served
        assert yard.shortest_time_between_swaps() >= turn_s
        assert yard.lost_s[0] <= 0.1 * yard.now_s + load_s + UNLOAD_S + yard.granularity_s
        assert len(yard.swaps) >= 0.5 * yard.now_s / turn_s

    def test_a_rare_request_for_another_model_waits_a_moment(self) -> None:
        """Given a device that is idle between two requests, as in a first trial."""
        yard = Yard([Model("a", 0.1), Model("b", 0.1)], devices=1, wait_s=0.0)
        for model in alternating(100, "a", "b"):
            yard.submit(model)
            yard.run(1.0)
        yard.run_until_served(100)

        assert yard.longest_wait_s <= 2 * (0.1 + UNLOAD_S) / 0.1

    def test_a_large_model_gets_its_turn_among_small_ones_that_swap_all_the_time(self) -> None:
        small = [Model("a", 0.1), Model("b", 0.1)]
        yard = Yard([*small, Model("large", 8.0)], devices=1, wait_s=0.0)
        yard.submit("large")  # so that its cost is known
        yard.run(100.0)
        for _ in range(600):
            yard.submit(*"aaaaabbbbb")
            yard.run(0.5)
            if yard.now_s == pytest.approx(200.0, abs=0.3):
                yard.submit("large")

        assert yard.served["large"] == 2
        assert len(yard.swaps) > 40


Arrivals = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.0, 4.0)), max_size=40)


# Shrinking a yard takes minutes.
@settings(max_examples=examples(5, deep=45), phases=[Phase.generate])
@given(
    devices=st.integers(1, 3),
    load_s=st.lists(st.floats(0.1, 2.0), min_size=4, max_size=4),
    shares=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    ranks=st.integers(1, 2),
)
def test_swaps_take_their_share_at_most_and_no_model_starves(
    devices: int, load_s: list[float], shares: list[int], ranks: int
) -> None:
    """Given an overload of four models, one of them a group, for a long time."""
    models = [Model(name, one) for name, one in zip("abcd", load_s, strict=True)]
    models[1].ranks = min(ranks, devices)
    yard = Yard(models, devices, wait_s=0.0)
    yard.measured = set("abcd")
    while yard.now_s < 100.0:
        for model, share in zip("abcd", shares, strict=True):
            yard.submit(*model * share)
        yard.run(0.5)

    dearest_s = max(load_s) + UNLOAD_S
    for device in yard.devices:
        most_s = 0.1 * yard.now_s + dearest_s + yard.granularity_s
        # The devices of a group wait for each other, which is not measured before.
        assert yard.lost_s[device.index] <= most_s or models[1].ranks > 1
    assert set(yard.served) == set("abcd")


@settings(max_examples=examples(30, deep=240))
@given(
    devices=st.integers(1, 4),
    arrivals=Arrivals,
    loads=st.lists(st.floats(0.1, 8.0), min_size=4, max_size=4),
    ranks=st.integers(1, 3),
    pin=st.integers(0, 1),
)
def test_every_request_is_served_and_no_device_thrashes(
    devices: int, arrivals: list[tuple[str, float]], loads: list[float], ranks: int, pin: int
) -> None:
    """Whatever comes whenever, as long as the pinned model leaves enough devices."""
    models = [Model(name, load_s) for name, load_s in zip("abcd", loads, strict=True)]
    models[0].pin = pin if devices > 1 else 0
    models[1].ranks = min(ranks, devices - models[0].pin)
    yard = Yard(models, devices)
    for model, pause_s in arrivals:
        yard.submit(model)
        yard.run(pause_s)

    yard.run_until_served(len(arrivals))

    assert yard.shortest_time_between_swaps() >= yard.wait_s
    assert all(command.why for command in yard.commands)
