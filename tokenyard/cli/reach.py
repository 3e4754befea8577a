"""How the commands that use a yard find its broker."""

from __future__ import annotations

from tokenyard.errors import BrokerUnavailable
from tokenyard.program import YardChoice


def url_of(choice: YardChoice) -> str:
    """The broker's URL, given or found; raises `BrokerUnavailable` where there is none."""
    if not choice.redis_url:
        raise BrokerUnavailable(
            f"no broker for yard {choice.yard!r}: start `tokenyard up` in another terminal, or"
            " give `tokenyard --redis-url URL` or TOKENYARD_REDIS_URL"
        )
    return choice.redis_url
