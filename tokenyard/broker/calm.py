"""Faults of Redis in the logs of long-lived programs: named by its URL and user, and not too often.

Several threads of a program meet the same fault, and each tries again many times a second at
first. What is logged with an error of redis-py is put into our words here, and repeated only after
a while.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

import redis

from tokenyard.broker.connection import our_error

#: The same fault is told again after so long.
REPEAT_S: Final = 10.0


class CalmFaults(logging.Filter):
    """Lets each fault of Redis pass once in `REPEAT_S`; add it to a handler."""

    def __init__(self, url: str, repeat_s: float = REPEAT_S) -> None:
        super().__init__()
        self._url = url
        self._repeat_s = repeat_s
        self._told: dict[str, tuple[float, int]] = {}  # when, and how often it was left out since
        self._turn = threading.Lock()  # filters are asked before a handler takes its lock

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown."""
        args = record.args if isinstance(record.args, tuple) else ()
        faults = [one for one in args if isinstance(one, redis.RedisError)]
        if not faults:
            return True
        known = {fault: str(our_error(fault, self._url)) for fault in faults}
        record.args = tuple(known.get(one, one) if one in faults else one for one in args)
        if record.levelno > logging.WARNING:
            return True
        with self._turn:
            return self._is_due(record, " ".join(known.values()))

    def _is_due(self, record: logging.LogRecord, fault: str) -> bool:
        now = time.monotonic()
        told_at, left_out = self._told.get(fault, (-self._repeat_s, 0))
        if now - told_at < self._repeat_s:
            self._told[fault] = told_at, left_out + 1
            return False
        self._told = {one: told for one, told in self._told.items() if now - told[0] < 60.0}
        self._told[fault] = now, 0
        if left_out:
            record.msg = f"{record.msg} (and {left_out} times more since it was last told)"
        return True


def calm_down(url: str) -> None:
    """Let all of this process's logging tell the faults of this broker calmly."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(CalmFaults(url))
