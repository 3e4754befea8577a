"""The board's own process: its port, signals, and the order of its end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import signal
import socket
from contextlib import suppress
from typing import Final

from tokenyard import clock
from tokenyard.board.app import Board
from tokenyard.board.forms import ROOT
from tokenyard.board.settings import BoardOptions
from tokenyard.process.http_server import BoundedConnection, HttpServer, address, exit_after, listen
from tokenyard.process.program import Exit
from tokenyard.protocol.http_settings import BoardSettings
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health

log = logging.getLogger("tokenyard.board")

#: Time beyond the grace after which the process ends whatever its threads do.
_EXIT_S: Final = 10.0
_TURN_S: Final = 1.0


def serve(settings: BoardSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    listener = listen(settings)
    options = dataclasses.replace(
        BoardOptions.of(settings),
        shows_content_to=settings.content,
        session_s=settings.session_s,
        max_streams=settings.max_streams,
        max_reads=settings.max_reads,
        wait_s=settings.wait_s,
    )
    board = Board(options, settings.redis_url, settings.yard)
    try:
        asyncio.run(_serve(settings, board, listener))
    finally:
        board.close()
    return Exit.OK


async def _serve(settings: BoardSettings, board: Board, listener: socket.socket) -> None:
    server = HttpServer(board.app, settings, BoundedConnection)
    server.config.timeout_graceful_shutdown = math.ceil(settings.grace_s)
    probes = Health(settings.liveness_timeout_s)
    endpoint = None
    if settings.metrics_port:
        endpoint = Endpoint(None, probes, settings.metrics_host, settings.metrics_port)
        endpoint.start()

    def on_signal() -> None:
        """End in order: no stream, no new request; a second signal cuts immediately."""
        server.force_exit = server.should_exit
        server.should_exit = True
        exit_after(settings.grace_s + _EXIT_S)
        probes.stopping()
        board.end_streams()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    # Before the address is logged: whoever reads it may connect immediately.
    listener.listen()
    log.info("the board is at %s%s", address(settings, listener), ROOT)
    turning = asyncio.create_task(_turn(probes))
    try:
        await server.serve([listener])
    finally:
        turning.cancel()
        with suppress(asyncio.CancelledError):
            await turning
        if endpoint is not None:
            endpoint.stop()


async def _turn(probes: Health) -> None:
    """Report to the probes that the event loop makes progress."""
    while True:
        probes.turned()
        await clock.pause(_TURN_S)
