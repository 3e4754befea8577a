"""An operator of real workers, and what the tests of signals look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from click.testing import Result

from tests.support.hosts import Host
from tests.support.processes import START_S, Plant
from tests.support.streams import begun
from tests.support.waiting import eventually
from tokenyard.ops.control import SignalReceipt, Signals
from tokenyard.protocol.control import ALL, Order, RunState, Signal, model_scope
from tokenyard.protocol.wire import Request
from tokenyard.protocol.worker_info import WorkerInfo

ADDER = model_scope("adder")


class Operator:
    """Gives signals to a yard, and waits until all workers have obeyed."""

    def __init__(self, plant: Plant) -> None:
        self.signals = Signals(plant)

    def give(self, what: Signal, scope: str = ALL, **fields: Any) -> SignalReceipt:
        return self.signals.give(Order(signal=what, scope=scope, **fields))

    def say(self, what: Signal, scope: str = ALL, **fields: Any) -> None:
        assert self.signals.wait(self.give(what, scope, **fields), START_S) == []

    def reasons(self, what: Signal, scope: str = ALL, **fields: Any) -> dict[str, str]:
        """Why each worker does not obey."""
        left = self.signals.wait(self.give(what, scope, **fields), START_S)
        return {one.name: one.reason for one in left}


Command = Callable[..., Result]
NewHost = Callable[..., Host]
#: Opens a yard of a class.
Opened = Callable[[type[Any]], Any]


def running(plant: Plant, count: int = 3, max_tokens: int = 150) -> list[Request]:
    """Running streams of the adder."""
    return begun(plant, count, max_tokens, model="adder")


def published(plant: Plant, requests: list[Request]) -> list[int]:
    return [plant.published(one.id) for one in requests]


def count_nothing(plant: Plant, requests: list[Request]) -> None:
    """Check that no failure is counted against these requests."""
    for request in requests:
        ledger = plant.ledger(request.id)
        counted = {ledger.get(name, "0") for name in ("crashes", "faults", "suspected")}
        assert counted == {"0"}, ledger


def shows(host: Host, run_state: RunState, name: str = "host") -> WorkerInfo:
    """Wait until the roster shows a worker's run state; its entry.

    The roster follows the acknowledgement: the thread that renews the leases writes it.
    """

    def entry() -> WorkerInfo | None:
        found = host.find(name)
        return found[1] if found and found[1].run_state == run_state else None

    return eventually(entry)
