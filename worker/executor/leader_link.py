"""The leader's connections to its followers."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import TypeVar

from tokenyard import clock
from worker.engines import RankGroup
from worker.executor.messages import (
    Built,
    FromFollower,
    FromLeader,
    GroupError,
    GroupThread,
    Hello,
    Joined,
    Leave,
    Left,
    RankFailed,
)

log = logging.getLogger("tokenyard.worker.group")

GATHER_S = 120.0  # until all followers have connected
LATE_S = 10.0  # until late followers, which are then dismissed, have connected
RELEASE_S = 30.0  # until all are warm again
STUCK_S = 30.0  # inside vLLM after the group has broken

Expected = TypeVar("Expected", Built, Joined)


class LeaderLink:
    """A connection to each follower, and a thread that reads all of them."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._listener: socket.socket | None = None
        self._lines: dict[Connection, int] = {}
        #: By rank; None: its connection was lost.
        self._last_messages: dict[int, FromFollower | None] = {}
        self._heard = threading.Condition()
        self._fault: GroupError | None = None
        self._is_leaving = False
        self._outside = threading.Event()
        self._outside.set()
        self._wake: Callable[[], None] | None = None
        self._thread: GroupThread | None = None

    def open(self) -> None:
        """Listen at the address; followers that connect early wait."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._group.address)
        except OSError as error:
            listener.close()
            raise GroupError(
                f"cannot listen at {self._group.address}: {error}; each group needs an address of"
                " its own, of at most 100 characters"
            ) from error
        listener.listen(self._group.size)
        self._listener = listener

    def gather(self, timeout_s: float) -> None:
        """Accept all followers, then stop listening.

        Raises `GroupError` if one does not connect in time.
        """
        until = clock.monotonic() + timeout_s
        missing = set(range(1, self._group.size))
        try:
            while missing:
                line = self._accept(until)
                if line is None:
                    raise GroupError(f"{_ranks(missing)} did not connect within {timeout_s:g} s")
                rank = _authenticate(line)
                if rank in missing:
                    missing.discard(rank)
                    self._lines[line] = rank
                else:
                    log.warning(
                        "an unknown process connected to the group at %s", self._group.address
                    )
                    line.close()
        finally:
            self._close_listener()
            self._thread = GroupThread(self._listen)

    def tell(self, message: FromLeader) -> None:
        """Send a message to all followers that are still connected."""
        for line in list(self._lines):
            with contextlib.suppress(OSError):  # the reading thread notices a lost connection
                line.send(message)

    def await_all(self, kind: type[Expected], timeout_s: float) -> dict[int, Expected]:
        """Wait until all followers have sent a message of this kind; returns messages by rank.

        Raises `GroupError` if one fails, dies or sends nothing in time.
        """

        def said() -> dict[int, Expected]:
            return {
                rank: message
                for rank, message in self._last_messages.items()
                if isinstance(message, kind)
            }

        missing = set(range(1, self._group.size))
        with self._heard:
            self._heard.wait_for(lambda: self._fault or said().keys() == missing, timeout_s)
            self.check()
            messages = said()
        missing -= messages.keys()
        if missing:
            raise GroupError(f"{_ranks(missing)} did not get ready within {timeout_s:g} s")
        return messages

    def check(self, cause: Exception | None = None) -> None:
        """Raise the error that broke the group, if any."""
        if self._fault is not None:
            raise GroupError(*self._fault.args) from cause

    def mark_broken(self, reason: str) -> None:
        """Mark the group as broken; the first reason stays."""
        with self._heard:
            self._fault = self._fault or GroupError(reason)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Wrap calls that may wait for another rank and cannot be interrupted."""
        self._outside.clear()
        try:
            yield
        finally:
            self._outside.set()

    def when_broken(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from another thread once the group breaks."""
        self._wake = wake
        if self._fault is not None:
            wake()

    def dismiss(self) -> None:
        """Tell all followers to leave; ignore errors from now on."""
        self._is_leaving = True
        if self._listener is not None:
            # Followers that are about to connect must not find the address gone.
            with contextlib.suppress(GroupError):
                self.gather(LATE_S)
        self.tell(Leave())

    def close(self) -> None:
        """Wait until all followers have left, then close; idempotent."""
        if self._thread is not None:
            with self._heard:
                self._heard.wait_for(lambda: not self._lines, RELEASE_S)
        if self._lines:
            log.warning("%s did not leave within %g s", _ranks(self._lines.values()), RELEASE_S)
        if self._thread is not None:
            self._thread.stop()
        self._wake = None
        for line in self._lines:
            line.close()
        self._lines.clear()

    def _accept(self, until: float) -> Connection | None:
        if self._listener is None:
            raise GroupError("the group no longer listens")
        self._listener.settimeout(max(0.001, until - clock.monotonic()))
        try:
            accepted, _ = self._listener.accept()
        except TimeoutError:
            return None
        accepted.setblocking(True)
        return Connection(accepted.detach())

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            Path(self._group.address).unlink(missing_ok=True)

    def _listen(self, wakeup: Connection) -> None:
        while self._lines:
            ready = wait([*self._lines, wakeup])
            if wakeup in ready:
                return
            for line in [line for line in self._lines if line in ready]:
                self._hear(line)

    def _hear(self, line: Connection) -> None:
        rank = self._lines[line]
        message: FromFollower | None = None
        with contextlib.suppress(EOFError, OSError):
            message = line.recv()
        with self._heard:
            self._last_messages[rank] = message
            if message is None or isinstance(message, Left):
                del self._lines[line]
                line.close()
            is_fault = message is None or isinstance(message, RankFailed)
            breaks = is_fault and not (self._is_leaving or self._fault)
            if breaks:
                text = f"failed: {message.text}" if isinstance(message, RankFailed) else "has died"
                self._fault = GroupError(f"{_ranks([rank])} {text}")
            self._heard.notify_all()
        if breaks:
            self._break()

    def _break(self) -> None:
        log.error("%s", self._fault)
        if self._wake is not None:
            self._wake()
        # A collective may wait for a dead rank forever. The parent kills this process; if it does
        # not, the exception of this thread ends it (see `worker.process.main`).
        if not clock.wait(self._outside, STUCK_S):
            self.check()


def _authenticate(line: Connection) -> int | None:
    """Authenticate a connection and return its rank; None if it is not a follower."""
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
