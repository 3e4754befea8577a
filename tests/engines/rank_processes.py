"""Warm processes, and the groups that a test forms of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines.rank_calls import TENSOR, attend, close, live, load
from worker.engines import RankGroup

ANSWER_S = 90.0


forkserver = multiprocessing.get_context("forkserver")


class Warm:
    """A warm process of the pool."""

    def __init__(self) -> None:
        self._pipe, theirs = forkserver.Pipe()
        self.process = forkserver.Process(target=live, args=(theirs,))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def ask(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._pipe.send((function, arguments, named))

    def hear(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "no answer"
        return self._pipe.recv()

    def answer(self) -> Any:
        is_well, value = self.hear()
        assert is_well, value
        return value

    def fault(self) -> str:
        """The error that the function raised; "" if the process ended instead."""
        try:
            is_well, value = self.hear()
        except (EOFError, ConnectionResetError):
            return ""
        assert not is_well
        return str(value)

    def do(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.ask(function, *arguments, **named)
        return self.answer()

    def status(self) -> int | None:
        """The exit status, once it has ended."""
        self.process.join(ANSWER_S)
        return self.process.exitcode

    def end(self) -> None:
        self._pipe.close()
        self.process.join(5.0)
        self.process.kill()
        self.process.join()


class Pool:
    """Warm processes; the pool starts more if there are too few."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Warm] = []
        self._groups = 0
        self.address = folder  # of the newest group

    def take(self, count: int = 2) -> list[Warm]:
        living = [warm for warm in self.processes if warm.process.is_alive()]
        missing = [Warm() for _ in range(count - len(living))]
        self.processes += missing
        for warm in missing:
            assert warm.hear() == warm.pid
        return (living + missing)[:count]

    def invite(self, follower: Warm) -> RankGroup:
        """Let a process attend a new group; the argument of the group's leader."""
        self._groups += 1
        self.address = self.folder / f"group-{self._groups}"
        follower.ask(attend, RankGroup(str(self.address), 1, (0, 1)))
        return RankGroup(str(self.address), 0, (0, 1))

    def led(self) -> tuple[Warm, Warm]:
        """The leader and the follower of a new group that nobody releases."""
        leader, follower = self.take()
        leader.do(load, self.invite(follower), **TENSOR)
        return leader, follower

    @contextmanager
    def formed(self, leader: Warm, follower: Warm, **arguments: Any) -> Iterator[None]:
        """A group for the duration of the block; not released if the test kills a rank."""
        leader.do(load, self.invite(follower), **arguments)
        yield
        leader.do(close)
        follower.answer()
