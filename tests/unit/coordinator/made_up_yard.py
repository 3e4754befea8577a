"""A made-up yard whose clock a test turns: its placement swaps models."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from coordinator.placement.decide import PendingLoad, Situation, place
from coordinator.placement.devices import Worker
from coordinator.placement.needs import Demand
from tokenyard.protocol.control import Command
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
