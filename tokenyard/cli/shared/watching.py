"""Reads snapshots of a yard repeatedly, and keys from the terminal."""

from __future__ import annotations

import itertools
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tokenyard import clock
from tokenyard.broker.connection import open_connection, translated
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.yard import Yard
from tokenyard.yard.history import Snapshot, read_snapshot

#: Limits how long an unreachable broker freezes the picture.
_ANSWER_S: Final = 3.0
_CONNECT_S: Final = 2.0


def watch(
    url: str, yard: str, pause: Callable[[], object], count: int = 0
) -> Iterator[Snapshot | BrokerUnavailable]:
    """Snapshots of a yard, or why there is none now; the first one must succeed.

    ``pause`` waits between two of them, and ends it by returning True; so does their ``count``,
    unless it is 0. Raises what `translated` raises.
    """
    with open_connection(
        url, timeout_s=_ANSWER_S, connect_timeout_s=_CONNECT_S, retries=1
    ) as connection:
        for number in itertools.count(1):
            seen: Snapshot | BrokerUnavailable
            try:
                with translated(url):
                    seen = read_snapshot(Yard(connection, Keys(yard)))
            except BrokerUnavailable as error:
                if number == 1:
                    raise
                seen = error
            yield seen
            if number == count or pause():
                return


@contextmanager
def single_keys() -> Iterator[None]:
    """The terminal hands on each key at once, without Enter."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def wait_for_key(seconds: float) -> str:
    """The key pressed within this time, or ""; without a terminal there is none."""
    if not sys.stdin.isatty():
        clock.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if ready else ""
