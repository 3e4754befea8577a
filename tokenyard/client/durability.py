"""Where a request must be stored before its submission counts as accepted.

WAITAOF and WAIT (Redis and Valkey 7.2 or newer) wait for everything written before on the same
connection: one wait for a whole burst. Under ``appendfsync everysec`` some servers, including
Valkey 9.1, answer WAITAOF before they have written (redis#13793), and a client cannot detect that:
``disk`` is certain only under ``always``.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from tokenyard.client.operations import Command
from tokenyard.protocol.errors import InvalidRequest

Durability = Literal["memory", "disk", "replicated"]
LEVELS: Final = get_args(Durability)
#: Longest wait for a disk or a replica. A server that syncs once a second takes up to a second.
WAIT_S: Final = 5.0


def check_durability(value: Any) -> Durability:
    """Read the option ``durability``; raises `InvalidRequest`."""
    if value not in LEVELS:
        raise InvalidRequest("durability", f"use one of {', '.join(LEVELS)}")
    level: Durability = value
    return level


def wait_command(durability: Durability) -> Command | None:
    """The command that waits, to be sent after the writes; None for ``memory``."""
    wait_ms = int(1000 * WAIT_S)
    match durability:
        case "disk":
            return ("WAITAOF", 1, 0, wait_ms)
        case "replicated":
            return ("WAIT", 1, wait_ms)
        case _:
            return None


def durability_error(durability: Durability, answer: Any) -> str:
    """Why the writes are not known to be durable, from the answer to `wait_command`; else ""."""
    if isinstance(answer, Exception):
        text = str(answer)
        if "unknown command" in text.lower():
            return (
                "the server has no WAITAOF: that needs Redis 7.2 or Valkey, or appendfsync always"
            )
        return f"the server refuses: {text}"
    count = answer[0] if isinstance(answer, list) else answer
    if count >= 1:
        return ""
    where = "on its disk" if durability == "disk" else "at a replica"
    return f"the server did not have it {where} within {WAIT_S:g} s"
