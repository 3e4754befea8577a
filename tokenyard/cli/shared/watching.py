"""Reads snapshots of a yard repeatedly, and keys from the terminal."""

from __future__ import annotations

import itertools
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self

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
    url: str, yard: str, pause: Callable[[], bool], count: int = 0
) -> Iterator[Snapshot | BrokerUnavailable]:
    """Snapshots of a yard, or why there is none now; the first one must succeed.

    ``pause`` waits between two looks and says whether to go on; ``count`` is of the history, 0 for
    no bound. Raises what `translated` raises.
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
            if number == count or not pause():
                return


class Keyboard:
    """Reads single keys; none if standard input is not a terminal."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """The key pressed within this time, or ""."""
        if self._before is None:
            clock.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""
