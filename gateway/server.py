"""The gateway's process: sockets, signals, and the order of start and stop."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn, cast

import uvicorn
import uvloop

from tokenyard.process.program import Exit
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.http.connection import BoundedConnection

log = logging.getLogger("tokenyard.gateway")

#: Time beyond the grace after which the process ends whatever its threads do.
_EXIT_S: Final = 10.0

#: Time for requests to notice that their connections were closed.
_CUT_S: Final = 2.0


def serve(settings: GatewaySettings) -> NoReturn:
    """Serve until SIGTERM or SIGINT, and end the process."""
    listener = listen(settings)
    from gateway.frontend import derived

    derived.install()
    uvloop.run(_serve(settings, listener))
    logging.shutdown()
    # The interpreter would take seconds of CPU to take vLLM apart, and could miss its time to stop.
    os._exit(Exit.OK)


def listen(settings: GatewaySettings) -> socket.socket:
    """Open the port first: a port that is taken should not cost the time of an import."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        place = f"{settings.host}:{settings.port}"
        raise SettingsError([f"port: cannot listen on {place}: {error.strerror}"]) from error
    return listener


async def _serve(settings: GatewaySettings, listener: socket.socket) -> None:
    from gateway.announcements import OwnRules
    from gateway.app import Gateway
    from gateway.batches.storage import open_storage
    from gateway.frontend.models import FrontEnds
    from gateway.http.connection import bounded
    from gateway.models import ModelWatch
    from gateway.queue.health import YardHealth
    from gateway.queue.yard import YardQueue

    storage = open_storage(settings.files_dir, settings.files_url)
    if storage is not None:
        storage.start()
    queue = YardQueue(settings.redis_url, settings.yard)
    await queue.start()
    front_ends = FrontEnds(queue)
    rules = OwnRules(settings.paths, settings.trust_remote_code)
    models = ModelWatch(queue, front_ends, settings.refresh_s, rules)
    probes = Health(settings.liveness_timeout_s)
    health = YardHealth(
        queue.connection, settings.redis_url, queue.keys, settings.without_leader_s, probes
    )
    app = Gateway(settings, queue, front_ends, models, health, storage)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        http=bounded(settings),
        ws="none",
        timeout_keep_alive=math.ceil(settings.idle_s),
        limit_concurrency=settings.max_connections,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    endpoint = None
    if settings.metrics_port:
        endpoint = Endpoint(app.metrics, probes, settings.metrics_host, settings.metrics_port)
    server = _GatewayServer(config)
    try:
        await health.start()
        await models.start()
        if endpoint is not None:
            endpoint.start()
        port = listener.getsockname()[1]
        scheme = "http" if settings.tls_cert is None else "https"
        log.info("serving %s://%s:%d/v1", scheme, settings.host, port)
        stopping = asyncio.create_task(_stop_on_signal(server, app, probes, settings))
        await server.serve([listener])
        stopping.cancel()
    finally:
        probes.stopping()
        if endpoint is not None:
            endpoint.stop()
        await models.stop()
        await health.stop()
        await queue.stop()


class _GatewayServer(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the gateway."""
        yield

    def cut(self) -> None:
        """Close all connections once what was written is sent; no stream is completed."""
        for connection in list(self.server_state.connections):
            cast("BoundedConnection", connection).transport.close()


async def _stop_on_signal(
    server: _GatewayServer, app: Gateway, probes: Health, settings: GatewaySettings
) -> None:
    """End in order: take nothing new, let answers finish, then cut what is left.

    The port stays open until then, so that load balancers see that the gateway is stopping. A
    second signal cuts immediately.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await stop.wait()
    log.info("stopping: answers under way may finish for %g s", settings.grace_s)
    _exit_after(settings.grace_s + _EXIT_S)
    app.is_draining = True
    probes.stopping()
    if await _drained(app, settings.grace_s, hurry):
        log.info("stopping immediately")
        _exit_after(_EXIT_S)
    await app.interrupt(_CUT_S)
    server.cut()
    await app.drained(_CUT_S)
    server.should_exit = server.force_exit = True


async def _drained(app: Gateway, grace_s: float, hurry: asyncio.Event) -> bool:
    """Wait until no answer is under way; whether that was cut short by a second signal."""
    waits = [asyncio.create_task(app.drained(grace_s)), asyncio.create_task(hurry.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for one in waits:
        one.cancel()
    return hurry.is_set()


def _exit_after(seconds: float) -> None:
    """End the process in any case: the interpreter would wait for a thread that waits for a hub."""
    last = threading.Timer(seconds, os._exit, (Exit.OK,))
    last.daemon = True
    last.start()
