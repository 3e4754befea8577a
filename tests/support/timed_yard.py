"""A whole yard in one process, in which time passes when the test says so.

Coordinators and engines are turned by the test. The clock of this process and that of the server
move together, by small steps in which those who renew a lease have done so. The server's runs on in
between, so what must not have happened yet is looked at well before its time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import redis

from coordinator.coordinator import Coordinator
from tests.support.fake_clock import FakeClock
from tests.support.lanes import Lanes
from tests.support.set_server import SetServer
from tests.support.waiting import eventually
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import WorkerInfo
from tokenyard.scripts import Scripts
from tokenyard.scripts.calls import LostLeadership
from tokenyard.telemetry.tracing import Tracer
from worker.engines import Memory
from worker.engines.simulated.engine import SimulatedEngine, SpeedModel
from worker.host.membership import Membership
from worker.messages import Serve, ToProcess
from worker.models import ModelSpec
from worker.process.lane_session import RedisLaneSession
from worker.process.loop import EngineLoop
from worker.process.recent_results import RecentResults
from worker.process.stats import RunningStats

LEASE_MS: Final = 30_000
#: Shorter than the time after which a lease is renewed, or a measurement of the clock is old.
STEP_S: Final = 1


class TimedWorker:
    """A host with one engine, which makes a token of each request in a turn."""

    def __init__(self, url: str, keys: Keys, name: str, max_num_seqs: int) -> None:
        engine = SimulatedEngine("sim", speed=SpeedModel(max_num_seqs=max_num_seqs))
        self._connection = redis.Redis.from_url(url)
        self._scripts = Scripts(Yard(self._connection, keys))
        self._keys = keys
        self.membership = Membership(self._scripts, LEASE_MS, on_lost=lambda _: None)
        info = WorkerInfo(
            name=name, model="sim", state="ready", lane_limit=2 * max_num_seqs, controller=name
        )
        self.worker = self.membership.join(info)
        self.is_away = False
        settings = WorkerSettings(
            redis_url=url, yard=keys.yard, engine="simulated", name=name, block_ms=20
        )
        inbox: queue.SimpleQueue[ToProcess] = queue.SimpleQueue()
        results = RecentResults()

        def open_session(worker: str) -> RedisLaneSession:
            spec = ModelSpec(name="sim", path="sim")
            return RedisLaneSession(
                settings,
                spec,
                engine.info,
                worker,
                inbox,
                stats=RunningStats(),
                tracer=Tracer("", ""),
                results=results,
            )

        memory = Memory(host=0)
        self.loop = EngineLoop(engine, inbox, open_session, lambda: memory, lambda _: None, results)
        inbox.put(Serve(self.worker))

    def turn(self) -> None:
        """One step of the engine, and of what a host does besides."""
        if not self.is_away:
            self.membership.renew()
            self.loop.run_once()

    def close(self) -> None:
        self.loop._end_session()
        self._connection.close()


class TimedYard(Lanes):
    """One yard on a server of which the test sets the clock."""

    def __init__(self, server: SetServer, clock: FakeClock) -> None:
        super().__init__(server.url)
        self._server = server
        self._clock = clock
        self._now_s = time.time()
        server.set_clock(0.0)
        self.coordinators: dict[str, Coordinator] = {}
        self.workers: dict[str, TimedWorker] = {}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        for one in self.coordinators.values():
            with suppress(redis.RedisError):
                one._close()
        super().close()

    def start_coordinator(self, name: str) -> None:
        """A coordinator that leads or stands by."""
        settings = self.settings(name=name, block_ms=1, lease_ms=LEASE_MS, static=True)
        self.coordinators[name] = Coordinator(settings)
        self.turn()

    def start_worker(self, name: str, max_num_seqs: int = 4) -> TimedWorker:
        """A host that serves."""
        self.workers[name] = TimedWorker(self.url, self.keys, name, max_num_seqs)
        self.turn()
        return self.workers[name]

    def turn(self) -> None:
        """Everybody who is there has a turn; a standby's would take a tenth of its lease."""
        for one in self.coordinators.values():
            one._wakeup.set()
            # Else its read takes the 100 ms after which an idle server looks at its clock.
            self.connection.xadd(self.keys.events, {"event": "turn"}, maxlen=100)
            try:
                one.run_once()
            except LostLeadership:
                one._leadership.lose()
        for worker in self.workers.values():
            worker.turn()

    def until(self, check: Callable[[], object]) -> None:
        """Let time go by slowly until something holds."""

        def turned() -> object:
            self._step(STEP_S / 5)
            return check()

        eventually(turned)

    def pass_time(self, seconds: int) -> None:
        """Let time go by everywhere."""
        for _ in range(seconds):
            self._step(STEP_S)

    def _step(self, seconds: float) -> None:
        self._now_s += seconds
        # Also the time that this test has taken so far goes by for the server; take it back.
        self._server.set_clock(self._now_s - time.time())
        self._clock.advance(seconds)
        self.turn()
