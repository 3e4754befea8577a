"""Records in the audit what a command has changed, beside what is done at the board."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

import redis

from tokenyard.cli.shared.console import say
from tokenyard.ops.audit import COMMAND_LINE, AuditEntry, record
from tokenyard.process.home import user_name
from tokenyard.protocol.yard import Yard

_VARIABLE = "TOKENYARD_OPERATOR"


def operator() -> str:
    """The user who runs this, as ``user@host``."""
    return f"{user_name()}@{socket.gethostname()}"


def note(
    yard: Yard,
    action: str,
    targets: Iterable[str],
    text: str,
    *,
    why: str = "",
    by: str = "",
) -> None:
    """Record what was done; where that fails, a warning: it is done all the same."""
    entry = AuditEntry(
        who=by or os.environ.get(_VARIABLE) or operator(),
        role=COMMAND_LINE,
        action=action,
        target=", ".join(targets),
        text=text,
        why=why,
    )
    try:
        record(yard, entry)
    except redis.RedisError as error:
        say(f"Warning: this is not in the audit: {error}", err=True)
