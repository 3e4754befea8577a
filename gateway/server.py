"""The gateway's process: sockets, signals, and the order of start and stop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import signal
import socket
from typing import TYPE_CHECKING, Final, NoReturn

import uvloop

from gateway.http.errors import GatewayError, is_of_messages, messages_error
from tokenyard.broker.tasks import first_of
from tokenyard.process.extras import how_to_install
from tokenyard.process.http_server import BoundedConnection, HttpServer, address, exit_after, listen
from tokenyard.process.program import Exit
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health

if TYPE_CHECKING:
    from gateway.app import Gateway
    from tokenyard.board.app import Board

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


async def _serve(settings: GatewaySettings, listener: socket.socket) -> None:
    from gateway.announcements import OwnRules
    from gateway.app import Gateway
    from gateway.batches.files import FileStore, open_storage
    from gateway.frontend.fetching import MediaFetcher
    from gateway.frontend.models import FrontEnds
    from gateway.models import ModelWatch
    from gateway.queue.health import YardHealth
    from gateway.queue.yard import YardQueue

    storage = open_storage(settings.files_dir, settings.files_url)
    if storage is not None:
        storage.start()
    queue = YardQueue(settings.redis_url, settings.yard)
    await queue.start()
    read_file = FileStore(storage).content if storage else None
    front_ends = FrontEnds(
        queue,
        settings.max_grammar_bytes,
        MediaFetcher(settings.allowed_media_domains, read_file),
    )
    rules = OwnRules(settings.paths, settings.trust_remote_code)
    models = ModelWatch(queue, front_ends, settings.refresh_s, rules)
    probes = Health(settings.liveness_timeout_s)
    health = YardHealth(queue, settings.without_leader_s, probes)
    board = open_board(settings)
    app = Gateway(settings, queue, front_ends, models, health, storage, board)
    endpoint = None
    if settings.metrics_port:
        endpoint = Endpoint(app.metrics, probes, settings.metrics_host, settings.metrics_port)
    probes.watch(queue.loop.fault, health.loop.fault, models.loop.fault)
    server = HttpServer(app, settings, GatewayConnection)
    try:
        await health.start()
        await models.start()
        if endpoint is not None:
            endpoint.start()
        # Before the address is logged: whoever reads it may connect immediately.
        listener.listen()
        log.info("serving %s/v1", address(settings, listener))
        if board is not None:
            log.info("the board is at %s/board", address(settings, listener))
        stopping = asyncio.create_task(_stop_on_signal(server, app, probes, settings))
        await server.serve([listener])
        stopping.cancel()
    finally:
        probes.stopping()
        if endpoint is not None:
            endpoint.stop()
        await models.stop()
        await health.loop.stop()
        await queue.stop()
        if board is not None:
            board.close()


def open_board(settings: GatewaySettings) -> Board | None:
    """The board with a gateway's settings; None where it is off, or cannot be."""
    if not settings.board:
        return None
    try:
        from tokenyard.board.app import Board
        from tokenyard.board.settings import BoardOptions
    except ModuleNotFoundError as error:
        why = how_to_install(error)
        if not why:
            raise
        log.warning("no board: %s", why)
        return None
    options = dataclasses.replace(
        BoardOptions.of(settings),
        shows_content_to=settings.board_content,
        session_s=settings.board_session_s,
        max_streams=settings.board_max_streams,
    )
    return Board(options, settings.redis_url, settings.yard)


class GatewayConnection(BoundedConnection):
    """Refuses in the form of the endpoint, if its name has come."""

    content_type = b"application/json"

    def refusal(self, status: int, message: str) -> bytes:
        """An error as OpenAI's or Anthropic's clients expect it."""
        if is_of_messages(self.url.partition(b"?")[0].decode("latin-1")):
            return messages_error(status, message, secrets.token_hex(16))
        return GatewayError(status, message).body()


async def _stop_on_signal(
    server: HttpServer, app: Gateway, probes: Health, settings: GatewaySettings
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
    exit_after(settings.grace_s + _EXIT_S)
    app.drain()
    probes.stopping()
    await first_of(app.drained(settings.grace_s), hurry.wait())
    if hurry.is_set():
        log.info("stopping immediately")
        exit_after(_EXIT_S)
    await app.interrupt(_CUT_S)
    server.cut()
    await app.drained(_CUT_S)
    server.should_exit = server.force_exit = True
