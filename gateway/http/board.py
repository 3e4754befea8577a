"""The board in a gateway, at ``/board``: `tokenyard.board`, where what it needs is installed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tokenyard.process.extras import how_to_install
from tokenyard.protocol.gateway_settings import GatewaySettings

if TYPE_CHECKING:
    from tokenyard.board.app import Board

log = logging.getLogger("tokenyard.gateway")

#: Also its name in the metrics.
ROOT: Final = "/board"
_UNDER: Final = ROOT + "/"


def is_of_board(path: str) -> bool:
    """Whether this is a path of the board."""
    return path.startswith(_UNDER) or path == ROOT


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
    options = BoardOptions(
        needs_keys=settings.needs_keys,
        shows_content_to=settings.board_content,
        hosts=settings.hosts if settings.needs_keys else (settings.own_name,),
        session_s=settings.board_session_s,
        has_tls=settings.tls_cert is not None,
        max_streams=settings.board_max_streams,
    )
    return Board(options, settings.redis_url, settings.yard)
