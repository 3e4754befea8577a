"""An outage of the broker: its log lines, and the pauses between tries."""

from __future__ import annotations

import logging
from typing import Final

import redis
from redis.backoff import ExponentialWithJitterBackoff

from tokenyard import clock
from tokenyard.broker.connection import refused_write
from tokenyard.protocol.errors import BrokerNotWritable, TokenyardError

#: An outage that lasts is logged again after this time.
EVERY_S: Final = 30.0
_MOST_DOUBLINGS: Final = 64


class Backoff(ExponentialWithJitterBackoff):
    """redis-py's pauses, which overflow after 1,023 failures in a row."""

    def compute(self, failures: int) -> float:
        """The seconds until the next try."""
        return super().compute(min(failures, _MOST_DOUBLINGS))


class Outage:
    """Logs the broker errors of one loop that retries, and spaces its tries; for one thread."""

    def __init__(self, log: logging.Logger, what: str, *, longest_pause_s: float = 2.0) -> None:
        """``what`` names the operation that fails, for example "renewing leases"."""
        self._log = log
        self._what = what
        self._began = 0.0
        self._logged_at = 0.0
        self._cause = ""
        self._backoff = Backoff(cap=longest_pause_s, base=0.05)
        self._failures = 0

    def note(self, error: Exception) -> float:
        """Note a failure; the seconds until the next try.

        Logs it if it is new, or was logged long ago. One that is not the broker's has its
        traceback.
        """
        self._log_error(error)
        self._failures += 1
        return self._backoff.compute(self._failures)

    def _log_error(self, error: Exception) -> None:
        now = clock.monotonic()
        code, what = refused_write(error)
        # Numbers and hosts in the texts of errors do not distinguish them.
        cause = error.code if isinstance(error, BrokerNotWritable) else code or type(error).__name__
        if not self._cause:
            self._began = now
        if cause == self._cause and now - self._logged_at < EVERY_S:
            return
        since = f", for {now - self._began:.0f} s now" if self._cause else ""
        is_foreseen = isinstance(error, redis.RedisError | TokenyardError)
        self._log.warning(
            "%s: %s; trying again%s",
            self._what,
            # Any other error stays an object, so that `tokenyard.process.logs` can add the broker.
            f"the broker {what}" if what else error,
            since,
            exc_info=None if is_foreseen else error,
        )
        self._cause, self._logged_at = cause, now

    def over(self) -> None:
        """Note a success; logs it after an outage."""
        self._failures = 0
        if self._cause:
            self._log.info(
                "%s: works again after %.0f s", self._what, clock.monotonic() - self._began
            )
            self._cause = ""
