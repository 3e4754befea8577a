"""Log lines for an outage of the broker: when it begins, now and then, and when it ends."""

from __future__ import annotations

import logging
from typing import Final

import redis

from tokenyard import clock
from tokenyard.broker.connection import refused_write
from tokenyard.protocol.errors import BrokerNotWritable, TokenyardError

#: An outage that lasts is logged again after this time.
EVERY_S: Final = 30.0


class Outage:
    """Logs the broker errors of one loop that retries; for one thread."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """``what`` names the operation that fails, for example "renewing leases"."""
        self._log = log
        self._what = what
        self._began = 0.0
        self._logged_at = 0.0
        self._cause = ""

    def note(self, error: Exception) -> None:
        """Note a failure; logs it if it is new, or was logged long ago.

        One that is not the broker's has its traceback.
        """
        now, cause = clock.monotonic(), _cause(error)
        if not self._cause:
            self._began = now
        if cause == self._cause and now - self._logged_at < EVERY_S:
            return
        since = f", for {now - self._began:.0f} s now" if self._cause else ""
        is_foreseen = isinstance(error, redis.RedisError | TokenyardError)
        self._log.warning(
            "%s: %s; trying again%s",
            self._what,
            _message(error),
            since,
            exc_info=None if is_foreseen else error,
        )
        self._cause, self._logged_at = cause, now

    def over(self) -> None:
        """Note a success; logs it after an outage."""
        if self._cause:
            self._log.info(
                "%s: works again after %.0f s", self._what, clock.monotonic() - self._began
            )
            self._cause = ""


def _message(error: Exception) -> object:
    """What is wrong, and what to do where the broker takes no writes.

    Any other error stays an object, so that `tokenyard.broker.log_throttle` can add the broker.
    """
    what = refused_write(error)[1]
    return f"the broker {what}" if what else error


def _cause(error: Exception) -> str:
    """Distinguishes errors; numbers and hosts in their texts do not."""
    code = error.code if isinstance(error, BrokerNotWritable) else refused_write(error)[0]
    return code or type(error).__name__
