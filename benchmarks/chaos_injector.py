"""Carries a schedule of faults out on a plant, and heals it in the end."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from benchmarks.chaos_faults import Kind, Planned
from benchmarks.chaos_history import Fault, HistoryWriter, now
from benchmarks.chaos_plant import Plant, Program

T = TypeVar("T")
_POLL_S: Final = 0.05
#: A program that was told to end and did not within this time is broken.
_TERM_TIMEOUT_S: Final = 20.0


class Injector:
    """Breaks one process after the other, each for its time."""

    def __init__(self, plant: Plant, history: HistoryWriter) -> None:
        self._plant = plant
        self._history = history
        # What is due when: the number breaks ties.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._stopped: set[int] = set()  # processes under SIGSTOP

    def play(self, faults: Sequence[Planned]) -> None:
        """Carry the schedule out; returns once everything is healed again."""
        began = time.monotonic()
        for fault in faults:
            self._plan(began + fault.at_s, partial(self._strike, fault))
        while self._due:
            at, _, act = heapq.heappop(self._due)
            time.sleep(max(0.0, at - time.monotonic()))
            act()
        self._heal()

    def _plan(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at, next(self._count), act))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._plan(time.monotonic() + seconds, act)

    def _strike(self, fault: Planned) -> None:
        """One fault; nothing where all that it could hit is down."""
        part, act = fault.kind
        if part == "broker":
            self._strike_broker(fault)
            return
        programs = self._plant.coordinators if part == "coordinator" else self._plant.controllers
        program = _choose([one for one in programs if one.pid], fault.which)
        if program is None:
            return
        target, pids = program.name, [program.pid]
        if part == "worker":
            workers = [(one, pid) for one in programs for pid in one.workers()]
            victim = _choose(workers, fault.which)
            if victim is None:
                return
            target, pids = victim[0].name, [victim[1]]
        elif part == "host":
            pids += program.workers()
        self._log(fault.kind, target, pids)
        self._signal(act, pids, fault.lasts_s)
        if part != "worker" and act != "stop":
            since = time.monotonic() + fault.lasts_s
            self._later(fault.lasts_s, lambda: self._restart(program, pids[0], since))

    def _signal(self, act: str, pids: Sequence[int], lasts_s: float) -> None:
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[act]
        for pid in pids:
            _send(pid, number)
        if act == "stop":
            self._stopped |= set(pids)
            self._later(lasts_s, lambda: self._resume(pids))
        elif act == "term":
            self._resume([pid for pid in pids if pid in self._stopped])

    def _resume(self, pids: Sequence[int]) -> None:
        for pid in pids:
            if pid in self._stopped:
                self._stopped.discard(pid)
                _send(pid, signal.SIGCONT)

    def _restart(self, program: Program, ended: int, since: float) -> None:
        """Start a program again once the process that was told to end has done so."""
        if program.pid == ended:
            if time.monotonic() - since > _TERM_TIMEOUT_S:
                self._log(("controller", "kill"), f"{program.name} did not end", [ended])
                _send(ended, signal.SIGKILL)
            self._later(_POLL_S, lambda: self._restart(program, ended, since))
            return
        program.start()

    def _strike_broker(self, fault: Planned) -> None:
        broker = self._plant.broker
        if not broker.pid or broker.pid in self._stopped:
            return
        self._log(fault.kind, "broker", [broker.pid])
        match fault.kind[1]:
            case "stop":
                self._signal("stop", [broker.pid], fault.lasts_s)
            case "kill":
                broker.kill()
                self._later(fault.lasts_s, broker.start)
            case "term":
                broker.stop()
                self._later(fault.lasts_s, broker.start)

    def _heal(self) -> None:
        self._resume(list(self._stopped))
        self._plant.broker.start()
        for program in (*self._plant.coordinators, *self._plant.controllers):
            program.start()

    def _log(self, kind: Kind, target: str, pids: Sequence[int]) -> None:
        self._history.write(Fault(now(), " ".join(kind), target, list(pids)))


def _choose(items: Sequence[T], which: float) -> T | None:
    return items[int(which * len(items))] if items else None


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
