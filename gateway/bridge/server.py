"""The bridge's process: it attaches to front ends, is there for each of their lives, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.bridge import engine_core
from gateway.bridge.bridge import Bridge
from gateway.bridge.engine_core import Addresses, Channel, FrontGone
from gateway.bridge.journal import Journal
from gateway.bridge.model import ServedModel, until_announced
from gateway.bridge.requests import RequestReader
from gateway.queue.health import YardHealth
from gateway.queue.yard import YardQueue
from tokenyard.broker.tasks import BackgroundLoop, first_of
from tokenyard.process.extras import why_no_board
from tokenyard.process.program import Exit
from tokenyard.process.running import default_data_dir
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import BridgeSettings
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health

if TYPE_CHECKING:
    from gateway.bridge.key_check import KeyCheck

log = logging.getLogger("tokenyard.bridge")

_TURN_S: Final = 1.0
#: A failover takes seconds.
_WITHOUT_LEADER_S: Final = 10.0


def serve(settings: BridgeSettings) -> int:
    """Serve front ends until SIGTERM or SIGINT."""
    asyncio.run(_serve(settings))
    return Exit.OK


async def _serve(settings: BridgeSettings) -> None:
    if not settings.vllm_version.startswith(engine_core.KNOWN):
        known = ", ".join(engine_core.KNOWN)
        log.warning("front ends of vLLM %s are not known, but %s", settings.vllm_version, known)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    health = Health(settings.liveness_timeout_s)
    queue = YardQueue(settings.redis_url, settings.yard)
    await queue.start()
    front_ends: list[FrontEnd] = []
    probes = Health(settings.liveness_timeout_s)
    yard = YardHealth(queue, _WITHOUT_LEADER_S, probes)
    check = None
    bridge = Bridge(queue)
    queue.reader.tell = bridge.has_news
    endpoint = None
    if settings.metrics_port:
        endpoint = Endpoint(bridge, health, settings.metrics_host, settings.metrics_port)
        endpoint.start()
    try:
        model = await asyncio.to_thread(
            until_announced, settings, stop.is_set, health.turned, SettingsError
        )
        if model is None:
            return
        bridge.reader = RequestReader(model.name, settings.id_prefix, settings.result_ttl_s)
        bridge.task = model.task
        bridge.form = engine_core.failure_form(settings.vllm_version, model.task)
        ready = engine_core.ready(model.max_model_len, model.adapters, settings.vllm_version)
        for address in settings.handshake:
            journal = Journal(journal_path(settings, address))
            front_ends.append(FrontEnd(address, ready, journal, bridge))
        await yard.start()
        if settings.key_check_port:
            check = await _open_key_check(settings, queue, yard, model)
        for one in front_ends:
            one.loop.start()
        health.watch(queue.loop.fault, yard.loop.fault, *(one.loop.fault for one in front_ends))
        while not stop.is_set():
            unserved = [one.address for one in front_ends if not one.is_served]
            health.turned(f"no front end at {unserved[0]}" if unserved else probes.not_ready)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _TURN_S)
        health.stopping()
        log.info("stopping: answers under way may finish for %g s", settings.grace_s)
        await bridge.drain(settings.grace_s)
    finally:
        for one in front_ends:
            await one.stop()
        if check is not None:
            await check.stop()
        if endpoint is not None:
            endpoint.stop()
        await yard.loop.stop()
        await queue.stop()


async def _open_key_check(
    settings: BridgeSettings, queue: YardQueue, yard: YardHealth, model: ServedModel
) -> KeyCheck:
    if why := why_no_board():
        raise SettingsError([f"key_check_port: {why}"])
    from gateway.bridge.key_check import KeyCheck

    check = KeyCheck(queue, yard, model.name, settings.id_prefix, settings.key_check_port)
    await check.start()
    return check


def journal_path(settings: BridgeSettings, address: str) -> Path:
    """Where the journal for the front end at an address lies."""
    folder = settings.journal_dir or default_data_dir(settings.yard) / "bridge"
    return folder / f"{address.rpartition('/')[2].replace(':', '-')}.journal"


# One front end and its lives: the engine is there for each, and sees when it ends.

#: Time to find the sockets of a front end that an earlier bridge has met.
_FIND_S: Final = 5.0
_GONE: Final = "the bridge was gone"
_NO_SECOND: Final = "vLLM's front end in Python takes no second engine"


class FrontEnd:
    """Serves the front end that waits at an address, again after each of its deaths."""

    def __init__(self, address: str, ready: bytes, journal: Journal, bridge: Bridge) -> None:
        self.address = address
        self._ready = ready
        self._journal = journal
        self._bridge = bridge
        #: Whether it has its engine.
        self.is_served = False
        self.loop = BackgroundLoop(self._live, f"serving the front end at {address}", log)

    async def stop(self) -> None:
        """Leave it without an engine; the next bridge finds it by the journal."""
        await self.loop.stop()
        known = self._journal.addresses
        if known is not None and known.is_python:
            self._end(known)
        self._journal.close()

    async def _live(self) -> None:
        """Serve it until it ends."""
        known, waiting = self._journal.addresses, set(self._journal.open)
        if known is not None and known.is_python:
            log.warning("the front end at %s must start again: %s", self.address, _NO_SECOND)
            self._end(known)
            known = None
        try:
            if known is not None:
                await self._serve(known, waiting)
                return
            log.info("waiting for a front end at %s", self.address)
            addresses = await engine_core.meet(self.address)
            self._journal.begin(addresses)
            await self._serve(addresses, set())
        except FrontGone:
            self._journal.begin(None)

    async def _serve(self, addresses: Addresses, waiting: set[str]) -> None:
        """Be its engine; ``waiting`` are requests of an earlier one. Raises `FrontGone`."""
        pairs = zip(addresses.inputs, addresses.outputs, strict=True)
        channels = [Channel(*pair) for pair in pairs]
        try:
            for channel in channels:
                await channel.register(self._ready, _FIND_S)
                self._bridge.end(waiting, channel, _GONE)
            self._journal.begin(addresses)
            self._bridge.front_ends += 1
            self.is_served = True
            log.info("the front end at %s has its engine", self.address)
            gone = (channel.until_gone() for channel in channels)
            taking = [asyncio.create_task(self._take(channel)) for channel in channels]
            try:
                ended = await first_of(*gone, *taking)
                for task in ended.intersection(taking):
                    task.result()
                raise FrontGone
            finally:
                self.is_served = False
                self._bridge.front_ends -= 1
        except FrontGone:
            log.warning("the front end at %s is gone", self.address)
            for channel in channels:
                self._bridge.abandon(channel)
            raise
        finally:
            for channel in channels:
                channel.close()

    def _end(self, addresses: Addresses) -> None:
        """Have a front end that takes no second engine fail what waits, and end."""
        for pair in zip(addresses.inputs, addresses.outputs, strict=True):
            with contextlib.closing(Channel(*pair)) as channel:
                channel.die()
        self._journal.begin(None)

    async def _take(self, channel: Channel) -> None:
        while True:
            for kind, frames in await channel.receive():
                self._bridge.take(kind, frames, channel, self._journal)
