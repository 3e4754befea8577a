"""The leader's lines to its followers: who has come, what they say, and who has died."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import TypeVar

from worker.engines import Group
from worker.executor.messages import (
    Built,
    ConnectionLost,
    FromFollower,
    FromLeader,
    GroupError,
    Hello,
    Joined,
    Leave,
    Left,
    RankFailed,
)

log = logging.getLogger("tokenyard.worker.group")

GATHER_S = 120.0  # until all followers have come
LATE_S = 10.0  # until those have come that are sent away again
RELEASE_S = 30.0  # until all are warm again
STUCK_S = 30.0  # inside vLLM after the group has broken

Expected = TypeVar("Expected", Built, Joined)


class LeaderLink:
    """One line to each follower, and a thread that listens to all of them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._door: socket.socket | None = None
        self._lines: dict[Connection, int] = {}
        self._words: dict[int, FromFollower | ConnectionLost] = {}  # what each has said last
        self._heard = threading.Condition()
        self._fault: GroupError | None = None
        self._is_leaving = False
        self._outside = threading.Event()
        self._outside.set()
        self._wake: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._rope: Connection | None = None

    def open(self) -> None:
        """Open the door; followers that come early wait behind it."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            door.bind(self._group.address)
        except OSError as error:
            door.close()
            raise GroupError(
                f"cannot listen at {self._group.address}: {error}; each group needs an address of"
                " its own, of at most 100 characters"
            ) from error
        door.listen(self._group.size)
        self._door = door

    def gather(self, timeout_s: float) -> None:
        """Take in all followers, then close the door.

        Raises `GroupError` where one does not come in time.
        """
        until = time.monotonic() + timeout_s
        missing = set(range(1, self._group.size))
        try:
            while missing:
                line = self._accept(until)
                if line is None:
                    raise GroupError(f"{_ranks(missing)} did not come within {timeout_s:g} s")
                rank = _greet(line)
                if rank in missing:
                    missing.discard(rank)
                    self._lines[line] = rank
                else:
                    log.warning("a stranger came to the group at %s", self._group.address)
                    line.close()
        finally:
            self._close_door()
            self._start_listening()

    def tell(self, word: FromLeader) -> None:
        """Say this to all followers that are still there."""
        for line in list(self._lines):
            with contextlib.suppress(OSError):  # the listening thread hears that it has gone
                line.send(word)

    def await_all(self, kind: type[Expected], timeout_s: float) -> dict[int, Expected]:
        """The word of each follower, by rank, once all have said one of this kind.

        Raises `GroupError` where one fails, dies or says nothing in time.
        """

        def said() -> dict[int, Expected]:
            return {rank: word for rank, word in self._words.items() if isinstance(word, kind)}

        missing = set(range(1, self._group.size))
        with self._heard:
            self._heard.wait_for(lambda: self._fault or said().keys() == missing, timeout_s)
            self.check()
            words = said()
        missing -= words.keys()
        if missing:
            raise GroupError(f"{_ranks(missing)} did not get ready within {timeout_s:g} s")
        return words

    def check(self, cause: Exception | None = None) -> None:
        """Raise what has broken the group, if anything has."""
        if self._fault is not None:
            raise GroupError(*self._fault.args) from cause

    def mark_broken(self, reason: str) -> None:
        """Break the group, for this reason where there is none yet."""
        with self._heard:
            self._fault = self._fault or GroupError(reason)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around what may wait for another rank and cannot be woken."""
        self._outside.clear()
        try:
            yield
        finally:
            self._outside.set()

    def when_broken(self, wake: Callable[[], None]) -> None:
        """Call this, from another thread, once the group breaks."""
        self._wake = wake
        if self._fault is not None:
            wake()

    def dismiss(self) -> None:
        """Tell all followers to let go; from here on nothing that they say is a fault."""
        self._is_leaving = True
        if self._door is not None:
            # They may be on their way, and would look for the door when it is gone.
            with contextlib.suppress(GroupError):
                self.gather(LATE_S)
        self.tell(Leave())

    def close(self) -> None:
        """Wait until all have left, and close; idempotent."""
        if self._thread is not None:
            with self._heard:
                self._heard.wait_for(lambda: not self._lines, RELEASE_S)
        if self._lines:
            log.warning("%s did not let go in %g s", _ranks(self._lines.values()), RELEASE_S)
        self._stop_listening()
        self._wake = None
        for line in self._lines:
            line.close()
        self._lines.clear()

    def _accept(self, until: float) -> Connection | None:
        if self._door is None:
            raise GroupError("the door of the group is closed")
        self._door.settimeout(max(0.001, until - time.monotonic()))
        try:
            accepted, _ = self._door.accept()
        except TimeoutError:
            return None
        accepted.setblocking(True)
        return Connection(accepted.detach())

    def _close_door(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()
            Path(self._group.address).unlink(missing_ok=True)

    def _start_listening(self) -> None:
        wakeup, self._rope = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(
            target=self._listen, args=(wakeup,), name="group", daemon=True
        )
        self._thread.start()

    def _stop_listening(self) -> None:
        if self._rope is not None:
            self._rope.close()
        if self._thread is not None:
            self._thread.join()

    def _listen(self, wakeup: Connection) -> None:
        while self._lines:
            ready = wait([*self._lines, wakeup])
            if wakeup in ready:
                return
            for line in [line for line in self._lines if line in ready]:
                self._hear(line)

    def _hear(self, line: Connection) -> None:
        rank = self._lines[line]
        try:
            word: FromFollower | ConnectionLost = line.recv()
        except (EOFError, OSError):
            word = ConnectionLost()
        with self._heard:
            self._words[rank] = word
            if isinstance(word, Left | ConnectionLost):
                del self._lines[line]
                line.close()
            breaks = isinstance(word, RankFailed | ConnectionLost) and not (
                self._is_leaving or self._fault
            )
            if breaks:
                text = f"failed: {word.text}" if isinstance(word, RankFailed) else "has died"
                self._fault = GroupError(f"{_ranks([rank])} {text}")
            self._heard.notify_all()
        if breaks:
            self._break()

    def _break(self) -> None:
        log.error("%s", self._fault)
        if self._wake is not None:
            self._wake()
        # A collective may wait for a dead rank for ever. Who started this process ends it; should
        # nobody do so, what an exception of this thread does is the process's own choice.
        if not self._outside.wait(STUCK_S):
            self.check()


def _greet(line: Connection) -> int | None:
    """The rank of a follower that has just come; None where it is none of ours."""
    key = multiprocessing.current_process().authkey
    try:
        deliver_challenge(line, key)
        answer_challenge(line, key)
        hello = line.recv()
    except (EOFError, OSError, AuthenticationError):
        return None
    return hello.rank if isinstance(hello, Hello) else None


def _ranks(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))} of the group"
