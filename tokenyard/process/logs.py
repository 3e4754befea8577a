"""The logs of all programs: harmless to read, and without the same broker error again and again.

Clients choose the ids, models and error texts in a record, so control characters are escaped: no
value can start a line, move the cursor or change the direction of text.

Several threads of a program meet the same error of the broker, and each retries many times a
second at first. Records that have an error of redis-py as argument get our message, with URL and
user, and repeat only after a while.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

import redis

from tokenyard import clock
from tokenyard.broker.connection import our_error
from tokenyard.protocol.texts import harmless, printable

#: The one form that `tokenyard up` reads.
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: The same error is logged again after this time.
REPEAT_S: Final = 10.0


class HarmlessFormatter(logging.Formatter):
    """Escapes control characters and newlines in the values of a record."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """The record as text; a traceback keeps its lines."""
        shown = copy.copy(record)
        if isinstance(record.args, tuple):
            shown.args = tuple(map(_value, record.args))
        elif isinstance(record.args, Mapping):
            shown.args = {name: _value(value) for name, value in record.args.items()}
        return harmless(super().format(shown))


def _value(value: Any) -> Any:
    """Text in one line; numbers stay numbers, for formats that need them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int | float | bytes) or value is None:
        return value
    return printable(str(value))


class ErrorThrottle(logging.Filter):
    """A filter for handlers that lets each broker error pass once in `REPEAT_S`."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
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
        logged_at, dropped = self._logged.get(error, (-REPEAT_S, 0))
        if now - logged_at < REPEAT_S:
            self._logged[error] = logged_at, dropped + 1
            return False
        self._logged = {one: seen for one, seen in self._logged.items() if now - seen[0] < 60.0}
        self._logged[error] = now, 0
        if dropped:
            record.msg = f"{record.msg} (and {dropped} times more since it was last logged)"
        return True


def start(level: int) -> None:
    """Log to standard error, unless logging is configured already."""
    handler = logging.StreamHandler()
    handler.setFormatter(HarmlessFormatter())
    logging.basicConfig(level=level, handlers=[handler])


def throttle_errors(url: str) -> None:
    """Throttle the errors of this broker in all handlers of this process."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(ErrorThrottle(url))


def start_logging(redis_url: str, *, debug: bool = False) -> None:
    """Log to standard error, in the one form that `tokenyard up` reads."""
    start(logging.DEBUG if debug else logging.INFO)
    if not debug:
        throttle_errors(redis_url)
