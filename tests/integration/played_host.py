"""Workers that the test plays: what they write to the roster, and how they answer signals."""

from __future__ import annotations

from typing import Any

import msgspec
import redis

from tests.support.builders import make_worker_info
from tests.support.yard import LONG_MS
from tokenyard.ops.control import SignalReceipt, Signals, Unacknowledged
from tokenyard.protocol.control import (
    Acknowledgement,
    Command,
    DesiredState,
    Order,
    model_scope,
    parse_command,
)
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerInfo, encode_worker
from tokenyard.scripts import Scripts

ADDER = model_scope("adder")
PAUSE = Order(signal="PAUSE")
BOUND_S = 30.0


class PlayedHost:
    """Workers that do what the test says, as the roster shows it."""

    def __init__(self, scripts: Scripts, connection: redis.Redis, keys: Keys) -> None:
        self._scripts = scripts
        self._connection, self._keys = connection, keys
        self._infos: dict[str, WorkerInfo] = {}

    def join(self, name: str, lease_ms: int = LONG_MS, **fields: object) -> str:
        info = make_worker_info(name, **fields)
        worker = self._scripts.register(name, lease_ms, encode_worker(info))
        self._infos[worker] = info
        return worker

    def show(self, worker: str, **fields: object) -> None:
        self._infos[worker] = info = msgspec.structs.replace(self._infos[worker], **fields)
        assert self._scripts.renew(LONG_MS, [(worker, encode_worker(info))]) == [True]

    def obey(self, worker: str, given: SignalReceipt) -> None:
        self.show(worker, obeyed=given.ids[-1])

    def answer(self, worker: str, entry: str, reason: str = "") -> None:
        what = Acknowledgement(worker=worker, done=not reason, reason=reason)
        self._scripts.acknowledge(entry, what)

    def offer(self, controller: str, model: str) -> None:
        info = HostInfo(name=controller, models=[ModelInfo(name=model)])
        self._scripts.publish_host(info)

    def commands(self, behind: str) -> list[tuple[str, Command]]:
        start = "-" if behind == "-" else f"({behind}"
        found: Any = self._connection.xrange(self._keys.control, min=start)
        read = [(entry.decode(), parse_command(fields)) for entry, fields in found]
        return [(entry, command) for entry, command in read if command]

    def leave(self, worker: str) -> None:
        self._scripts.retire(worker, "left", "the test says so")


def names(unacknowledged: list[Unacknowledged]) -> list[str]:
    return [one.worker for one in unacknowledged]


def ordered(signals: Signals) -> dict[str, DesiredState]:
    """The desired states without who ordered them, when and why."""
    return {
        scope: msgspec.structs.replace(desired_state, by="", why="", since_ms=0)
        for scope, desired_state in signals.desired_states().by_scope.items()
    }
