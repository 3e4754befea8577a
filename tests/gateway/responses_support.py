"""A yard that serves the adder, with two gateways before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import redis

from tests.support.processes import Program
from tests.support.servers import free_port
from tests.support.up import Up, running_up
from tests.support.waiting import eventually
from tokenyard.admin.signals import Signals
from tokenyard.protocol.control import Order
from tokenyard.protocol.keys import Keys

READY_S: Final = 300.0
OBEYED_S: Final = 60.0
#: Nearly the adder's maximum length, and no answer ends before it.
LONG: Final[dict[str, Any]] = {
    "model": "adder",
    "input": "12+34=",
    "max_output_tokens": 56,
    "temperature": 0.0,
    "extra_body": {"ignore_eos": True},
}


class ResponsesStand:
    """One yard and the gateways before it, which share nothing but its broker."""

    def __init__(self, up: Up, folder: Path) -> None:
        self.keys = Keys(up.yard)
        self.connection = redis.Redis.from_url(up.url, socket_timeout=70.0)
        self._options = {"redis_url": up.url, "yard": up.yard}
        self._folder = folder
        self._ports: dict[int, int] = {}
        self._gateways: dict[int, Program] = {}

    def url(self, number: int) -> str:
        """The base URL of a gateway that serves; it is started if it does not run."""
        port = self._ports.setdefault(number, free_port())
        known = self._gateways.get(number)
        if known is None or not known.is_running:
            log = self._folder / f"gateway-{number}.log"
            self._gateways[number] = Program("gateway", self._options | {"port": port}, log)
        eventually(lambda: self._serves(number), timeout_s=READY_S, every_s=0.1)
        return f"http://127.0.0.1:{port}/v1"

    def _serves(self, number: int) -> bool:
        program = self._gateways[number]
        assert program.is_running, program.log[-3000:]
        with contextlib.suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{self._ports[number]}/v1/models"
            return bool(httpx.get(url, timeout=60.0).json()["data"])
        return False

    def kill(self, number: int) -> None:
        """SIGKILL a gateway."""
        self._gateways[number].kill()

    def log(self, number: int) -> str:
        """What a gateway has logged."""
        return self._gateways[number].log

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The workers generate nothing, and what they have stays where it is."""
        self._order(Order(signal="PAUSE", mode="keep"))
        try:
            yield
        finally:
            self._order(Order(signal="UNPAUSE"))

    def _order(self, order: Order) -> None:
        signals = Signals(self.connection, self.keys)
        assert signals.wait(signals.give(order), OBEYED_S) == []

    def end(self) -> None:
        """End the gateways."""
        for program in self._gateways.values():
            if program.is_running:
                program.kill()
        self.connection.close()


@contextmanager
def running_stand(folder: Path) -> Iterator[ResponsesStand]:
    """A stand that ends with the block."""
    with running_up(folder, "--slots", "1") as up:
        stand = ResponsesStand(up, folder)
        try:
            yield stand
        finally:
            stand.end()
