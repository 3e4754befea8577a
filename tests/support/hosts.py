"""A real controller with a pool of simulated engines, commanded as by a coordinator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import START_S, Plant, Program
from tests.support.waiting import eventually
from tokenyard.protocol.control import Acknowledgement, Command, Verb, decode_acknowledgement
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerInfo, WorkerState, decode_host
from worker.engines.simulated.engine import BROKEN

#: The models that every host here may load.
MODELS = f"""
[models.adder]
path = "org/adder"

[models.subtractor]
path = "org/subtractor"

[models.wakeful]
path = "org/wakeful"
sleep_level = 0

[models.bad]
path = "{BROKEN}"

[models.pair]
path = "org/pair"
tensor_parallel_size = 2

[models.bad-pair]
path = "{BROKEN}"
tensor_parallel_size = 2
"""


class Host:
    """One host of a yard; its workers are ``host-0``, ``host-1`` and so on, or only ``host``."""

    def __init__(self, plant: Plant, folder: Path, **options: object) -> None:
        """Start the host; `wait` returns when it is warm."""
        models = folder / "models.toml"
        models.write_text(MODELS, encoding="utf-8")
        self.plant = plant
        self.program: Program = plant.host(models, **options)

    # Looking

    def find(self, name: str) -> tuple[str, WorkerInfo] | None:
        """A worker's incarnation and roster entry while it holds a lease."""
        found = [(full, one) for full, one in self.plant.roster().items() if one.name == name]
        return max(found, key=lambda one: int(one[0].rpartition(".")[2]), default=None)

    def incarnation(self, name: str) -> str:
        """A worker's name with its incarnation; "" without an entry."""
        found = self.find(name)
        return found[0] if found else ""

    def state(self, name: str) -> str:
        """A worker's state in the roster; "" without an entry."""
        found = self.find(name)
        return found[1].state if found else ""

    def wait(self, state: WorkerState, *names: str, model: str = "") -> WorkerInfo:
        """Wait until workers are in a state, with a model; the roster entry of the last."""

        def there() -> list[WorkerInfo] | None:
            found = [self.find(name) for name in names]
            infos = [one[1] for one in found if one]
            is_so = all((info.state, info.model) == (state, model) for info in infos)
            return infos if is_so and len(infos) == len(names) else None

        return eventually(there, timeout_s=START_S)[-1]

    def entry(self) -> HostInfo:
        """The host's entry with its loadable models."""
        packed = self.plant.connection.hget(self.plant.keys.hosts, "host")
        assert packed
        return decode_host(packed)

    def model(self, name: str) -> ModelInfo:
        """The host's entry of a model."""
        (found,) = (one for one in self.entry().models if one.name == name)
        return found

    def process(self, name: str) -> psutil.Process:
        """The process of a worker."""
        found = self.find(name)
        assert found
        assert found[1].pid in {child.pid for child in self.program.children()}
        return psutil.Process(found[1].pid)

    # Commanding

    def command(self, verb: Verb, name: str, **fields: Any) -> str:
        """Command a worker; the entry, which `answer` takes."""
        found = self.find(name)
        assert found
        given = Command(verb=verb, worker=found[0], why="the test says so", **fields)
        entry = self.plant.scripts.command(given)
        assert entry
        return entry

    def acknowledgement(self, entry: str) -> Acknowledgement | None:
        """The acknowledgement of a command so far."""
        acks = self.plant.connection.hgetall(self.plant.keys.acks(entry))
        answers = [decode_acknowledgement(packed) for packed in acks.values()]
        assert len(answers) <= 1
        return answers[0] if answers else None

    def answer(self, entry: str) -> Acknowledgement:
        """Wait for the acknowledgement of a command."""
        return eventually(lambda: self.acknowledgement(entry), timeout_s=START_S)

    def obey(self, verb: Verb, name: str, **fields: Any) -> None:
        """Command a worker, and wait until it obeys."""
        answer = self.answer(self.command(verb, name, **fields))
        assert answer.done, answer.reason

    def refuse(self, verb: Verb, name: str, **fields: Any) -> str:
        """Command a worker, and wait until it refuses; the reason."""
        answer = self.answer(self.command(verb, name, **fields))
        assert not answer.done
        return answer.reason


def seconds_since(unix_ms: int) -> float:
    """Seconds since a time."""
    return time.time() - unix_ms / 1000


def processes(options: dict[str, object]) -> int:
    """How many processes a host with these options has."""
    slots, spares, sleepers = (
        int(str(options.get(name, at_least)))
        for name, at_least in (("slots", 1), ("spares", 0), ("sleepers", 0))
    )
    return slots * (1 + sleepers) + spares
