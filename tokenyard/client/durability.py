"""How safe a request must be before its submission counts as accepted.

Redis says it itself, by WAITAOF and WAIT (Redis and Valkey 7.2 or newer), for all that was written
before on the same connection: one wait for a whole burst. Under ``appendfsync everysec`` some
servers, Valkey 9.1 among them, answer WAITAOF before they have written (redis#13793), and nothing
that a client may ask tells them from others: only under ``always`` is ``disk`` sure.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from tokenyard.client.operations import Command
from tokenyard.protocol.errors import InvalidRequest

Durability = Literal["memory", "disk", "replicated"]
LEVELS: Final = get_args(Durability)
#: Longest wait for a disk or a replica. Where the server writes to its disk once a second, a wait
#: takes up to that.
WAIT_S: Final = 5.0


def check_durability(value: Any) -> Durability:
    """Read the option ``durability``; raises `InvalidRequest`."""
    if value not in LEVELS:
        raise InvalidRequest("durability", f"use one of {', '.join(LEVELS)}")
    level: Durability = value
    return level


def wait_command(durability: Durability) -> Command | None:
    """The command that waits for it, after what is to be waited for; None: there is none."""
    wait_ms = int(1000 * WAIT_S)
    match durability:
        case "disk":
            return ("WAITAOF", 1, 0, wait_ms)
        case "replicated":
            return ("WAIT", 1, wait_ms)
        case _:
            return None


def why_not(durability: Durability, answer: Any) -> str:
    """Why that command did not say that it is so; "" where it did."""
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
