"""The messages between the ranks of a group, over the Unix socket at the group's address.

    follower             leader
    Hello        ->
                 <-      Build      all are connected, and rank 0 is built
    Built        ->
                 <-      Join       all are built: from now on they wait for each other
    Joined       ->
                                    calls and answers use vLLM's message queues
                 <-      Leave
    Left         ->                 warm again

A follower may send `RankFailed` in place of any message, and later if a call without an answer
fails. A connection that ends without `Left` or `Leave` means that the other end died.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


class GroupError(RuntimeError):
    """A rank of the group has failed, died, or not connected; the message says which."""


class Dismissed(Exception):
    """The leader has released this rank; this is no error."""


@dataclass(frozen=True, slots=True)
class Hello:
    """From a follower: connected."""

    rank: int


@dataclass(frozen=True, slots=True)
class Build:
    """To a follower: build the worker of this pickled plan."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class Built:
    """From a follower: the worker is built and has not touched the device."""


@dataclass(frozen=True, slots=True)
class Join:
    """To a follower: meet the other ranks and load the model."""


@dataclass(frozen=True, slots=True)
class Joined:
    """From a follower: the model is loaded; ``answers`` is the handle of its queue."""

    answers: Any


@dataclass(frozen=True, slots=True)
class Leave:
    """To a follower: unload the model and be warm again."""


@dataclass(frozen=True, slots=True)
class Left:
    """From a follower: the model is unloaded."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """From a follower: an error."""

    text: str


FromFollower = Hello | Built | Joined | Left | RankFailed
FromLeader = Build | Join | Leave


class GroupThread:
    """The thread of a link: it waits for messages, until it is stopped."""

    def __init__(self, listen: Callable[[Connection], None]) -> None:
        """``listen`` returns when its argument can be read."""
        wakeup, self._wake = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=listen, args=(wakeup,), name="group", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Interrupt the wait, and wait for the end of the thread; idempotent."""
        self._wake.close()
        self._thread.join()


def describe(error: BaseException) -> str:
    """An exception in one line, to send to another rank."""
    return f"{type(error).__name__}: {error}"
