"""Whether the yard can be asked: its broker answers, and a coordinator leads."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from gateway.http.errors import unavailable
from tokenyard import clock
from tokenyard.broker.tasks import BackgroundLoop
from tokenyard.protocol.errors import TokenyardError
from tokenyard.telemetry.health import Health

if TYPE_CHECKING:
    from gateway.queue.calls import Command
    from gateway.queue.yard import YardQueue

log = logging.getLogger("tokenyard.gateway")

_EVERY_S: Final = 1.0


class YardHealth:
    """Looks at the yard once a second."""

    def __init__(self, queue: YardQueue, without_leader_s: float, health: Health) -> None:
        """``health`` is told of each look, for the probes."""
        self._queue = queue
        self._without_leader_s = without_leader_s
        self._led_at = clock.monotonic()
        self._health = health
        self._broker_error = ""
        self.loop = BackgroundLoop(self._turn, "looking at the yard", log)

    async def start(self) -> None:
        """Look once, and go on looking."""
        await self._look()
        self.loop.start()

    @property
    def lost(self) -> str:
        """Why a background task of the gateway is gone; empty while all go on."""
        return self._health.lost

    def check(self) -> None:
        """Raise `GatewayError` where a request would have nobody to serve it."""
        if self._broker_error:
            raise unavailable(self._broker_error)
        if clock.monotonic() - self._led_at > self._without_leader_s:
            raise unavailable(
                "no coordinator leads the yard; start one with `tokenyard coordinator`",
                code="NO_COORDINATOR",
                retry_after_s=2.0,
            )

    async def _turn(self) -> None:
        await clock.pause(_EVERY_S)
        await self._look()

    async def _look(self) -> None:
        """Ask the broker for the leader and the time. While it fails, `check` refuses requests."""
        questions: list[Command] = [("GET", self._queue.keys.leader), ("TIME",)]
        asked_at = clock.monotonic()
        try:
            leader, told = await self._queue.broker.carry_out(questions)
            self._queue.broker_time.measured(told, asked_at)
        except TokenyardError as error:
            self._broker_error = str(error)
            self._health.turned(f"no usable broker: {error}")
            return
        self._broker_error = ""
        if leader is not None:
            self._led_at = clock.monotonic()
        self._health.turned("" if leader is not None else "no coordinator leads")
