"""A yard whose workers get signals: its hosts, their operator, and the requests of its clients."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.builders import make_request
from tests.support.processes import Plant, Program
from tests.support.streams import check_exact, dead_letters, expected, streams
from tests.support.waiting import eventually
from tokenyard.ops.control import Signals, Unacknowledged
from tokenyard.protocol.control import ALL, DesiredState, Order, PauseMode, Signal
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.protocol.worker_info import WorkerInfo

STEP_S = 0.02
#: Leases of hosts: they end only when the test says so.
LEASE_MS = 3_600_000
BOUND_S = 60.0
NEW = "/checkpoints/new"


class Cast:
    """Four hosts, their operator, and the requests of their clients."""

    def __init__(self, plant: Plant, scope: str = ALL) -> None:
        self.plant = plant
        self.scope = scope
        self.signals = Signals(plant)
        self.hosts: dict[str, Program] = {}
        self.sent: list[Request] = []
        plant.coordinator()
        for name in "abc":
            self.enter(name)
        plant.wait_for_workers(3)
        plant.wait_for_turns("a", "b", "c")

    def enter(self, name: str) -> None:
        """Start a host, perhaps as the successor of one with that name."""
        self.hosts[name] = self.plant.worker(
            name=name, simulated_step_s=STEP_S, max_num_seqs=2, lease_ms=LEASE_MS, grace_s=0.5
        )

    def ask(self, count: int) -> list[Request]:
        """Submit more requests, most of them streams."""
        quiet = [
            make_request(tokens=[7, len(self.sent) + n], params=SamplingParams(max_tokens=20))
            for n in range(count // 4)
        ]
        more = [*streams(count - len(quiet), max_tokens=100), *quiet]
        self.plant.push_all(more)
        self.sent += more
        return more

    def order(self, signal: Signal, mode: PauseMode = "keep") -> Order:
        return Order(signal=signal, scope=self.scope, mode=mode, epoch=7, weights=NEW)

    def tell(self, *signals: Signal) -> None:
        """Give signals, and wait until all workers obey."""
        for signal in signals:
            given = self.signals.give(self.order(signal))
            assert self.signals.wait(given, BOUND_S) == []

    def desired_state(self) -> DesiredState:
        return self.signals.desired_states().by_scope.get(self.scope, DesiredState())

    def freeze(self, name: str) -> str:
        """Suspend all processes of a host; return its worker."""
        (worker,) = (one for one, info in self.plant.roster().items() if info.name == name)
        self.hosts[name].suspend()
        return worker

    def kill(self, name: str) -> None:
        """Send SIGKILL to a controller and its worker."""
        self.hosts[name].end()

    def newest(self) -> dict[str, WorkerInfo]:
        """The newest incarnation of each worker, by name."""
        roster = self.plant.roster()
        incarnations = sorted(roster, key=lambda worker: int(worker.rpartition(".")[2]))
        return {roster[worker].name: roster[worker] for worker in incarnations}

    def are_in(self, desired_state: DesiredState, names: str) -> None:
        """Wait until exactly these workers show the desired state."""

        def are_there() -> bool:
            shown = {name: _shown(info) for name, info in self.newest().items()}
            return shown == dict.fromkeys(names, _shown(desired_state))

        eventually(are_there, timeout_s=BOUND_S)

    def go_on(self) -> None:
        """Let all workers run again, from any desired state."""
        self.tell("RESUME", "UNPAUSE")

    def check_requests(self) -> None:
        """Check for one result and every token once; only the one death may count against them."""
        check_exact(self.plant, [one for one in self.sent if one.stream])
        quiet = [one for one in self.sent if not one.stream]
        for one, result in zip(quiet, self.plant.results(quiet), strict=True):
            assert result.ok, result.error
            assert result.tokens == expected(one)
        self.check_blame()

    def check_blame(self) -> None:
        ledgers = [self.plant.ledger(one.id) for one in self.sent]
        assert all(int(ledger.get("crashes", 0)) <= 1 for ledger in ledgers)
        assert not any({"suspected", "faults"} & ledger.keys() for ledger in ledgers)
        assert dead_letters(self.plant) == []


def _shown(one: WorkerInfo | DesiredState) -> tuple[object, ...]:
    """Run state, epoch and weights as shown; only the run state without an engine."""
    has_engine = one.run_state != "SUSPENDED"
    return (one.run_state, one.epoch, one.weights) if has_engine else (one.run_state,)


def workers(receipts: Sequence[Unacknowledged]) -> list[str]:
    return [one.worker for one in receipts]
