"""What a log says while a broker cannot be used: at once, now and then, and when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import redis

from tokenyard.broker.connection import refused_write
from tokenyard.protocol.errors import BrokerNotWritable, TokenyardError

#: An outage that lasts is told again after so long.
EVERY_S: Final = 30.0


class Outage:
    """Tells of the faults of one loop that tries again and again; for one thread."""

    def __init__(
        self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``what`` fails, in words, for example "renewing leases"."""
        self._log = log
        self._what = what
        self._clock = clock
        self._began = 0.0
        self._told_at = 0.0
        self._cause = ""

    def note(self, fault: redis.RedisError | TokenyardError) -> None:
        """It failed; told where that is new, or was told long ago."""
        now, cause = self._clock(), _cause(fault)
        if not self._cause:
            self._began = now
        if cause == self._cause and now - self._told_at < EVERY_S:
            return
        since = f", for {now - self._began:.0f} s now" if self._cause else ""
        self._log.warning("%s: %s; trying again%s", self._what, _told(fault), since)
        self._cause, self._told_at = cause, now

    def over(self) -> None:
        """It worked."""
        if self._cause:
            self._log.info("%s: works again after %.0f s", self._what, self._clock() - self._began)
            self._cause = ""


def _told(fault: redis.RedisError | TokenyardError) -> object:
    """What is wrong, and what to do where the broker takes no writes.

    Any other fault stays an object, so that `tokenyard.broker.calm` can name the broker in its
    words.
    """
    what = refused_write(fault)[1]
    return f"the broker {what}" if what else fault


def _cause(fault: redis.RedisError | TokenyardError) -> str:
    """What makes one fault another: numbers and hosts in its text do not."""
    code = fault.code if isinstance(fault, BrokerNotWritable) else refused_write(fault)[0]
    return code or type(fault).__name__
