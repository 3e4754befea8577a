"""A yard whose coordinators run in threads, and whose workers the test plays.

So a test decides when a lane is read and when a request finishes, and sees where each one is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import msgspec
import redis

from coordinator.coordinator import Coordinator
from tests.support.builders import make_request, make_result, random_name, worker_json
from tests.support.waiting import eventually
from tokenyard.protocol.control import Command, parse_command
from tokenyard.protocol.keys import INTAKE_CLASSES, Keys, PriorityClass, Yard
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.replies import Reply, decode_replies, decode_reply
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.streams import unix_ms
from tokenyard.protocol.wire import Assignment, Request, request_fields
from tokenyard.protocol.worker_info import HostInfo, ModelInfo
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Publication, Published

LONG_MS = 600_000
STOP_S = 30.0


@contextmanager
def running(coordinator: Coordinator) -> Iterator[Coordinator]:
    """Run a coordinator in a thread until the block ends."""
    thread = threading.Thread(target=coordinator.run, name="coordinator")
    thread.start()
    try:
        assert coordinator.wait_until_ready(STOP_S)
        yield coordinator
    finally:
        coordinator.stop()
        thread.join(STOP_S)
        assert not thread.is_alive(), "the coordinator did not stop"


class Lanes(Yard):
    """The workers of a yard, played by the test."""

    def __init__(self, url: str) -> None:
        connection = redis.Redis.from_url(url, socket_timeout=30.0)
        super().__init__(connection, Keys(random_name("yard")), url)
        self.scripts = Scripts(self)
        self._stack = ExitStack()
        self._coordinators: list[Coordinator] = []
        self._stack.callback(self.connection.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the coordinators that this object started."""
        self._stack.close()

    @property
    def now_ms(self) -> int:
        """The server's time."""
        told: Any = self.connection.time()
        return unix_ms(told)

    def settings(self, **values: Any) -> CoordinatorSettings:
        """Settings of a coordinator of this yard that stops quickly."""
        return CoordinatorSettings(
            redis_url=self.url,
            yard=self.keys.yard,
            **{"block_ms": 200, "lease_ms": 20_000, **values},
        )

    def coordinator(self, **values: Any) -> Coordinator:
        """Start a coordinator; it leads or stands by on return."""
        coordinator = Coordinator(self.settings(**values))
        self._coordinators.append(coordinator)
        return self._stack.enter_context(running(coordinator))

    def take_lead(self, **values: Any) -> Coordinator:
        """A coordinator that has no thread and has had its first turn; it places no models."""
        turned = {"block_ms": 20, "lease_ms": 60_000, "static": True}
        coordinator = Coordinator(self.settings(**(turned | values)))
        self._stack.callback(coordinator._close)
        coordinator.run_once()
        return coordinator

    # Workers

    def worker(
        self, name: str = "w", lane_limit: int = 1000, model: str = "sim", **info: Any
    ) -> str:
        """Register a worker, which does nothing by itself.

        A leader shortens leases that are longer than the roster says.
        """
        values = {"lease_ms": LONG_MS, "lane_limit": lane_limit, "model": model, **info}
        packed = worker_json(name, **values)
        return self.scripts.register(name, LONG_MS, packed)

    def warm(self, name: str = "w", device: int = 0, **info: Any) -> str:
        """Register a worker without a model; `host` owns its process."""
        values: dict[str, Any] = {"state": "warm", "controller": "host", "device": device}
        return self.worker(name, model="", **(values | info))

    def show(self, worker: str, **info: Any) -> None:
        """Set the roster entry of a worker of `host`."""
        values: dict[str, Any] = {"controller": "host", "lane_limit": 1000, "lease_ms": LONG_MS}
        packed = worker_json(worker.rpartition(".")[0], **(values | info))
        self.scripts.renew(LONG_MS, [(worker, packed)])

    def host(self, *models: str, devices: int = 1, **info: Any) -> None:
        """Set the models that `host` may load; ``info`` is for the last of them."""
        *others, last = [ModelInfo(name=model) for model in models]
        last = msgspec.structs.replace(last, **info)
        self.scripts.publish_host(HostInfo(name="host", devices=devices, models=[*others, last]))

    def commands(self) -> list[Command]:
        """The commands so far, in order."""
        entries = self.connection.xrange(self.keys.control)
        return [command for _, fields in entries if (command := parse_command(fields))]

    def lane(self, worker: str) -> list[Assignment]:
        """The entries of a lane, in order."""
        found = []
        for entry, fields in self.connection.xrange(self.keys.lane(worker)):
            assignment = parse_assignment(entry.decode(), fields)
            assert assignment is not None
            found.append(assignment)
        return found

    def ids(self, worker: str) -> list[str]:
        """The ids of the requests on a lane, in order."""
        return [assignment.request.id for assignment in self.lane(worker)]

    def load(self, worker: str) -> int:
        """Length of a lane."""
        return int(self.connection.xlen(self.keys.lane(worker)))

    def wait_for_load(self, worker: str, count: int, timeout_s: float = 60.0) -> list[str]:
        """The ids on a lane once it holds so many."""
        eventually(lambda: self.load(worker) == count, timeout_s=timeout_s)
        return self.ids(worker)

    def finish(self, worker: str, *assignments: Assignment) -> list[Published]:
        """Answer requests on a lane."""
        items = [Publication(one, make_result(one.request.id)) for one in assignments]
        return self.scripts.finish(worker, items)

    def serve(self, workers: Sequence[str], count: int, timeout_s: float = 60.0) -> list[str]:
        """Finish requests on the lanes, one at a time; their ids in that order."""
        served: list[str] = []

        def one_more() -> bool:
            for worker in workers:
                for assignment in self.lane(worker)[: min(1, count - len(served))]:
                    self.finish(worker, assignment)
                    served.append(assignment.request.id)
            return len(served) == count

        eventually(one_more, timeout_s=timeout_s, every_s=0.001)
        return served

    # Clients

    def push(
        self, requests: Sequence[Request], priority_class: PriorityClass = "normal"
    ) -> list[str]:
        """Submit by XADD, in order; the ids."""
        pipeline = self.connection.pipeline(transaction=True)
        for request in requests:
            fields: Any = request_fields(request)
            pipeline.xadd(self.keys.intake(priority_class), fields)
        pipeline.execute()
        return [request.id for request in requests]

    def push_raw(
        self, fields: Mapping[Any, Any], priority_class: PriorityClass | str = "normal"
    ) -> None:
        """Submit an entry with any fields."""
        self.connection.xadd(self.keys.intake(priority_class), dict(fields))

    def waiting(self) -> int:
        """The number of requests in the intakes, read or unread."""
        return sum(int(self.connection.xlen(self.keys.intake(name))) for name in INTAKE_CLASSES)

    def held(self, priority_class: PriorityClass = "normal") -> int:
        """The number of requests of a class that the last coordinator has read and not moved."""
        return self._coordinators[-1]._intake.backlog.count(priority_class)

    def heard(self, stream: str) -> int:
        """The number of entries of a stream that the last coordinator has read."""
        last = self._coordinators[-1]._intake._after.get(stream, "0-0")
        return len(self.connection.xrange(stream, max=last))

    def result(self, request_id: str, client: str = "anon", timeout_s: float = 60.0) -> Reply:
        """Wait for the result in the ledger."""
        ledger = self.keys.ledger(client, request_id)
        packed: bytes = eventually(
            lambda: self.connection.hget(ledger, "result"), timeout_s=timeout_s
        )
        return decode_reply(packed)

    def replies(self, request_id: str, client: str = "anon") -> list[Reply]:
        """All entries of a request's own reply stream."""
        entries = self.connection.xrange(self.keys.reply(client, request_id))
        return [reply for _, fields in entries for reply in decode_replies(fields)]

    def dead(self) -> list[dict[bytes, bytes]]:
        """The dead letters."""
        return [fields for _, fields in self.connection.xrange(self.keys.dead)]


def requests(count: int, prefix: str = "r") -> list[Request]:
    """So many requests, whose names sort in their order."""
    return [make_request(f"{prefix}{at:04}") for at in range(count)]
