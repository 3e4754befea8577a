"""A follower's line to its leader."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import TypeVar

from worker.engines import Group
from worker.executor.messages import (
    Build,
    Built,
    ConnectionLost,
    Dismissed,
    FromLeader,
    GroupError,
    Hello,
    Join,
    Joined,
    Leave,
    Left,
    RankFailed,
)

CONNECT_S = 120.0  # until the leader's door is there
WORD_S = 1800.0  # until the leader speaks; that it dies is heard at once
STUCK_S = 30.0  # inside vLLM after the group has ended
_RETRY_S = 0.02

Expected = TypeVar("Expected", Build, Join)


class FollowerLink:
    """The line, and a thread that hears on it that the group ends."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._line: Connection | None = None
        self._end: FromLeader | ConnectionLost | None = None  # the leader's last word
        self._ended = threading.Event()
        self._finished = threading.Event()
        self._wake: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._rope: Connection | None = None

    def connect(self) -> None:
        """Find the leader.

        Raises `GroupError` where nobody opens in time, `Dismissed` where the leader gives up.
        """
        line = self._line = self._find_door()
        key = multiprocessing.current_process().authkey
        try:
            if not line.poll(WORD_S):
                raise GroupError(f"the leader did not open within {WORD_S:g} s")
            answer_challenge(line, key)
            deliver_challenge(line, key)
            line.send(Hello(self._group.rank))
        except (EOFError, ConnectionError) as error:
            raise Dismissed("the leader closed its door") from error

    def say(self, word: Built | Joined | Left | RankFailed) -> None:
        """Say this to the leader, if it is still there."""
        with contextlib.suppress(OSError):
            self._opened.send(word)

    def hear(self, kind: type[Expected]) -> Expected:
        """The leader's next word. Raises `Dismissed`, or `GroupError` where it has died."""
        if not self._opened.poll(WORD_S):
            raise GroupError(f"the leader said nothing for {WORD_S:g} s")
        word = self._receive()
        if isinstance(word, kind):
            return word
        raise _ending(word)

    def watch(self, wake: Callable[[], None]) -> None:
        """From here on a thread listens, and calls ``wake`` when the group ends."""
        self._wake = wake
        wakeup, self._rope = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(
            target=self._listen, args=(wakeup,), name="group", daemon=True
        )
        self._thread.start()

    def await_end(self, timeout_s: float) -> None:
        """Wait until the group ends; raises as `check` does."""
        self._ended.wait(timeout_s)
        self.check()
        raise GroupError(f"the leader has not let go within {timeout_s:g} s")

    def check(self) -> None:
        """Raise `Dismissed`, or `GroupError` where the leader has died."""
        if self._end is not None:
            raise _ending(self._end)

    def unwatch(self) -> None:
        """Nothing waits for another rank any more, and nothing is to be woken; idempotent."""
        self._finished.set()
        if self._rope is not None:
            self._rope.close()
        if self._thread is not None:
            self._thread.join()
        self._wake = None

    def close(self) -> None:
        """Close the line; idempotent."""
        self.unwatch()
        if self._line is not None:
            self._line.close()

    @property
    def _opened(self) -> Connection:
        if self._line is None:
            raise GroupError("no line to the leader")
        return self._line

    def _find_door(self) -> Connection:
        until = time.monotonic() + CONNECT_S
        while True:
            try:
                return Client(self._group.address, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if time.monotonic() > until:
                    raise GroupError(f"nobody leads the group at {self._group.address}") from error
                time.sleep(_RETRY_S)

    def _receive(self) -> FromLeader | ConnectionLost:
        try:
            word: FromLeader = self._opened.recv()
        except (EOFError, OSError):
            return ConnectionLost()
        return word

    def _listen(self, wakeup: Connection) -> None:
        if wakeup in wait([self._opened, wakeup]):
            return
        self._end = self._receive()
        self._ended.set()
        if self._wake is not None:
            self._wake()
        # As in the leader: a collective may wait for a dead rank for ever.
        if not self._finished.wait(STUCK_S):
            raise GroupError(f"still inside vLLM {STUCK_S:g} s after the group has ended")


def _ending(word: FromLeader | ConnectionLost) -> Dismissed | GroupError:
    match word:
        case Leave():
            return Dismissed("the leader has let go")
        case ConnectionLost():
            return GroupError("the leader of the group has died")
        case _:
            return GroupError(f"the leader said {word}")
