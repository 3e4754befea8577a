"""The board on a loopback port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tests.support.servers import free_port
from tests.support.waiting import eventually
from tokenyard.board.app import Board
from tokenyard.board.settings import BoardOptions


@contextmanager
def serving(redis_url: str, yard: str, options: BoardOptions | None = None) -> Iterator[str]:
    """Serve the board in a thread; its URL without the path."""
    board = Board(options or BoardOptions(needs_keys=False), redis_url, yard)
    port = free_port()
    config = uvicorn.Config(
        board.app, port=port, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
        board.close()
