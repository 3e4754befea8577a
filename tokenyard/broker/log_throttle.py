"""Broker errors in the logs of long-lived programs: with URL and user, and not too often.

Several threads of a program meet the same error, and each retries many times a second at first.
Records that have an error of redis-py as argument get our message here, and repeat only after a
while.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

import redis

from tokenyard import clock
from tokenyard.broker.connection import our_error

#: The same error is logged again after this time.
REPEAT_S: Final = 10.0


class ErrorThrottle(logging.Filter):
    """A filter for handlers that lets each broker error pass once in `REPEAT_S`."""

    def __init__(self, url: str, repeat_s: float = REPEAT_S) -> None:
        super().__init__()
        self._url = url
        self._repeat_s = repeat_s
        self._logged: dict[str, tuple[float, int]] = {}  # when, and how many were dropped since
        self._lock = threading.Lock()  # filters run before a handler takes its lock

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown."""
        args = record.args if isinstance(record.args, tuple) else ()
        errors = [one for one in args if isinstance(one, redis.RedisError)]
        if not errors:
            return True
        known = {error: str(our_error(error, self._url)) for error in errors}
        record.args = tuple(known.get(one, one) if one in errors else one for one in args)
        if record.levelno > logging.WARNING:
            return True
        with self._lock:
            return self._is_due(record, " ".join(known.values()))

    def _is_due(self, record: logging.LogRecord, error: str) -> bool:
        now = clock.monotonic()
        logged_at, dropped = self._logged.get(error, (-self._repeat_s, 0))
        if now - logged_at < self._repeat_s:
            self._logged[error] = logged_at, dropped + 1
            return False
        self._logged = {one: seen for one, seen in self._logged.items() if now - seen[0] < 60.0}
        self._logged[error] = now, 0
        if dropped:
            record.msg = f"{record.msg} (and {dropped} times more since it was last logged)"
        return True


def throttle_errors(url: str) -> None:
    """Throttle the errors of this broker in all handlers of this process."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(ErrorThrottle(url))
