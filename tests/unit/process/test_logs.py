"""Faults of Redis in logs: named, without the password, and seldom."""

from __future__ import annotations

import logging

import pytest
import redis

from tests.support.builders import random_name
from tests.support.fake_clock import FakeClock
from tokenyard.process.logs import REPEAT_S, ErrorThrottle

URL = "redis://ann:secret@broker:6379/0"
REFUSED = redis.ConnectionError("Error 111 connecting to broker:6379. Connection refused.")


class Log:
    """A logger of the test's own, with what it has let pass."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.messages.append(record.getMessage())
        handler.addFilter(ErrorThrottle(URL))
        logger = logging.getLogger(random_name("tokenyard.test"))
        logger.addHandler(handler)
        self.warning, self.error = logger.warning, logger.error


@pytest.fixture
def log(fake_clock: FakeClock) -> Log:
    return Log()


def test_an_error_is_logged_with_url_and_user_but_no_password(log: Log) -> None:
    log.warning("%s; again in %.1f s", REFUSED, 0.5)
    wrong = redis.AuthenticationError("invalid username-password pair")
    log.warning("renewing leases: %s; again in %.1f s", wrong, 0.5)
    first, second = log.messages
    assert first.startswith("Redis at redis://ann@broker:6379/0 does not answer: Error 111")
    assert first.endswith("; again in 0.5 s")
    assert "Redis at redis://ann@broker:6379/0 refuses the user or password" in second
    assert "secret" not in " ".join(log.messages)


def test_the_same_error_is_logged_once_in_a_while(log: Log) -> None:
    for pause in range(20):
        log.warning("%s; again in %.1f s", REFUSED, pause)
        log.warning("renewing leases: %s", REFUSED)
    assert len(log.messages) == 1
    log.warning("%s", redis.TimeoutError("another one"))
    assert len(log.messages) == 2


def test_the_number_of_dropped_records_is_logged(log: Log, fake_clock: FakeClock) -> None:
    for _ in range(4):
        log.warning("%s", REFUSED)
    fake_clock.advance(REPEAT_S)
    log.warning("%s", REFUSED)
    assert len(log.messages) == 2
    assert log.messages[-1].endswith("(and 3 times more since it was last logged)")


def test_other_records_and_errors_always_pass_the_throttle(log: Log) -> None:
    for _ in range(3):
        log.warning("w-0.2: lost, %d entries go back: %s", 2, "ended by SIGKILL")
        log.error("%s", REFUSED)
    assert len(log.messages) == 6
