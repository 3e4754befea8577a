"""Yards with workers that the test writes, for the pages of devices and models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from tests.support.builders import make_request, make_worker_info, random_name
from tests.support.yard import LONG_MS
from tokenyard.protocol.control import Acknowledgement, Command, parse_command
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, encode_worker
from tokenyard.scripts import Scripts


@dataclass
class DeviceYard:
    """Hosts and workers that do what the test says."""

    connection: redis.Redis
    keys: Keys
    scripts: Scripts

    def join(self, name: str, **fields: Any) -> str:
        """A worker; its name with incarnation."""
        return self.scripts.register(name, LONG_MS, encode_worker(make_worker_info(name, **fields)))

    def show(self, worker: str, name: str, **fields: Any) -> None:
        """Change a worker's entry."""
        packed = encode_worker(make_worker_info(name, **fields))
        self.scripts.renew(LONG_MS, [(worker, packed)])

    def join_many(self, count: int, **fields: Any) -> None:
        """Workers of ten hosts, written at once."""
        now_ms = int(self.connection.time()[0]) * 1000
        entries, leases = {}, {}
        for number in range(count):
            controller, device = f"host-{number // 10}", number % 10
            name = f"{controller}-{device}"
            info = make_worker_info(name, controller=controller, device=device, **fields)
            entries[f"{name}.1"] = encode_worker(info)
            leases[f"{name}.1"] = now_ms + LONG_MS
        self.connection.hset(self.keys.workers, mapping=entries)
        self.connection.zadd(self.keys.leases, leases)

    def offer(self, controller: str, *models: str | ModelInfo, devices: int = 8) -> None:
        """A host that may load these models."""
        infos = [ModelInfo(name=one) if isinstance(one, str) else one for one in models]
        self.scripts.publish_host(HostInfo(name=controller, devices=devices, models=infos))

    def serve(self, *models: str | ModelInfo, devices: int = 8) -> str:
        """A leader, a host that may load these models, and its worker, with ``adder``."""
        self.lead()
        self.offer("gpu-1", *models, devices=devices)
        return self.join("gpu-1-0", controller="gpu-1")

    def lead(self) -> str:
        """A leader; its token."""
        return self.scripts.lead("north", LONG_MS)

    def wait_for(self, model: str, count: int, **fields: Any) -> None:
        """Requests that wait."""
        self.scripts.submit("normal", [make_request(model=model, **fields) for _ in range(count)])

    def commands(self) -> Sequence[tuple[str, Command]]:
        """The commands that were sent, the oldest first."""
        found: Any = self.connection.xrange(self.keys.control)
        read = ((entry.decode(), parse_command(fields)) for entry, fields in found)
        return [(entry, command) for entry, command in read if command]

    def answer(self, entry: str, worker: str, reason: str = "") -> None:
        """Answer a command as its worker does."""
        what = Acknowledgement(worker=worker, done=not reason, reason=reason)
        self.scripts.acknowledge(entry, what)


def keys_asked_for(url: str, keys: Keys, call: Callable[[], object]) -> list[str]:
    """The keys of the yard in all commands of a call, as the broker hears them."""
    prefix, end = keys.leader.removesuffix("leader"), random_name("end")
    heard: list[str] = []
    with redis.Redis.from_url(url) as connection, connection.monitor() as monitor:
        call()
        with redis.Redis.from_url(url) as other:
            other.echo(end)
        for said in monitor.listen():
            if end in said["command"]:
                return [word for word in heard if word.startswith(prefix)]
            if said["client_type"] != "lua":
                heard += [word.strip('"') for word in said["command"].split()]
    raise AssertionError("the monitor has ended")
