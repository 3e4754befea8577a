"""What the ranks of a group say to each other over the Unix socket at the group's address.

    follower             leader
    Hello        ->
                 <-      Orders     all are here, and rank 0 is built
    Built        ->
                 <-      Go         all are built: from here on they wait for each other
    Joined       ->
                                    calls and answers travel over vLLM's own message queues
                 <-      LetGo
    Left         ->                 warm again

A `RankFailed` may come instead of any word of a follower, and later when a call fails whose answer
nobody waits for. A line that ends without `Left` or `Leave` means that its other end has died.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class GroupError(RuntimeError):
    """A rank of the group has failed, died, or not come; the message says which."""


class Dismissed(Exception):
    """The leader has let go, which is no fault."""


@dataclass(frozen=True, slots=True)
class Hello:
    """From a follower: here I am."""

    rank: int


@dataclass(frozen=True, slots=True)
class Build:
    """To a follower: what to build, as the leader has packed it."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class Built:
    """From a follower: the worker is there, and has touched nothing yet."""


@dataclass(frozen=True, slots=True)
class Join:
    """To a follower: meet the other ranks and load."""


@dataclass(frozen=True, slots=True)
class Joined:
    """From a follower: the model is loaded; ``answers`` is the handle of its queue."""

    answers: Any


@dataclass(frozen=True, slots=True)
class Leave:
    """To a follower: be warm again."""


@dataclass(frozen=True, slots=True)
class Left:
    """From a follower: nothing of the model is left here."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """From a follower: this went wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """Nobody says this: it stands for the word of a line that has ended."""


FromFollower = Hello | Built | Joined | Left | RankFailed
FromLeader = Build | Join | Leave


def describe(error: BaseException) -> str:
    """An exception in one line, as it travels to another rank."""
    return f"{type(error).__name__}: {error}"
