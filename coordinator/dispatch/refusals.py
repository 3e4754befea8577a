"""Requests that are answered without being run, and why: one form for all who refuse."""

from __future__ import annotations

from tokenyard.protocol.errors import Code
from tokenyard.protocol.wire import Refused, Request


def refuse(request: Request, code: Code, message: str, *, is_dead: bool = False) -> Refused:
    """A request that is not run; with ``is_dead`` it is also kept among the dead letters."""
    return Refused(
        request.id,
        request.client,
        request.reply_to,
        code,
        message,
        request.result_ttl_s,
        is_dead=is_dead,
    )


def late(request: Request, where: str) -> Refused:
    """A request whose deadline has passed."""
    message = f"the deadline passed while the request was {where}"
    return refuse(request, Code.DEADLINE_EXCEEDED, message)
