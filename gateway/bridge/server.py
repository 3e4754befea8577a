"""The bridge's process: it attaches to front ends, and leaves them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from pathlib import Path
from typing import Final

from gateway.bridge import engine_core
from gateway.bridge.bridge import Bridge
from gateway.bridge.front import Front
from gateway.bridge.journal import Journal
from gateway.bridge.model import NotAnnounced, ServedModel, find_model
from gateway.bridge.requests import RequestReader
from gateway.queue.yard import YardQueue
from tokenyard.process.program import Exit
from tokenyard.process.running import default_data_dir
from tokenyard.protocol.bridge_settings import BridgeSettings
from tokenyard.protocol.errors import TokenyardError
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health

log = logging.getLogger("tokenyard.bridge")

_TURN_S: Final = 1.0


def serve(settings: BridgeSettings) -> int:
    """Serve front ends until SIGTERM or SIGINT."""
    asyncio.run(_serve(settings))
    return Exit.OK


async def _serve(settings: BridgeSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    health = Health(settings.liveness_timeout_s)
    queue = YardQueue(settings.redis_url, settings.yard)
    await queue.start()
    fronts: list[Front] = []
    bridge = Bridge(queue, is_told=engine_core.tells_errors(settings.vllm_version))
    queue.reader.tell = bridge.has_news
    endpoint = None
    if settings.metrics_port:
        endpoint = Endpoint(bridge, health, settings.metrics_host, settings.metrics_port)
        endpoint.start()
    try:
        model = await _until_announced(queue, settings, health, stop)
        if model is None:
            return
        bridge.reader = RequestReader(model.name, settings.id_prefix, settings.result_ttl_s)
        ready = engine_core.ready(model.max_model_len, model.adapters, settings.vllm_version)
        for address in settings.handshake:
            journal = Journal(journal_path(settings, address))
            fronts.append(Front(address, ready, journal, bridge))
        for front in fronts:
            front.loop.start()
        health.watch(queue.loop.fault, *(front.loop.fault for front in fronts))
        while not stop.is_set():
            unserved = [front.address for front in fronts if not front.is_served]
            health.turned(f"no front end at {unserved[0]}" if unserved else "")
            await _pause(stop)
        health.stopping()
        log.info("stopping: answers under way may finish for %g s", settings.grace_s)
        await bridge.drain(settings.grace_s)
    finally:
        for front in fronts:
            await front.stop()
        if endpoint is not None:
            endpoint.stop()
        await queue.stop()


async def _until_announced(
    queue: YardQueue, settings: BridgeSettings, health: Health, stop: asyncio.Event
) -> ServedModel | None:
    """The model, once a host announces it; None where that is not to be waited for any more."""
    is_told = False
    while not stop.is_set():
        why = ""
        try:
            hosts = await queue.command("HGETALL", queue.keys.hosts)
            workers = await queue.command("HGETALL", queue.keys.workers)
            return find_model(hosts, workers, settings)
        except (NotAnnounced, TokenyardError) as error:
            why = str(error)
        health.turned(why)
        if not is_told:
            log.warning("waiting: %s", why)
            is_told = True
        await _pause(stop)
    return None


async def _pause(stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), _TURN_S)


def journal_path(settings: BridgeSettings, address: str) -> Path:
    """Where the journal for the front end at an address lies."""
    folder = settings.journal_dir or default_data_dir(settings.yard) / "bridge"
    return folder / f"{address.rpartition('/')[2].replace(':', '-')}.journal"
