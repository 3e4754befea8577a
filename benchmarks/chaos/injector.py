"""Carries out a schedule of faults on a plant, and repairs it at the end."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import redis

from benchmarks.chaos.faults import Act, Part, Planned
from benchmarks.chaos.history import Fault, HistoryWriter, Key, Missed, Trimmed, now
from benchmarks.chaos.plant import Plant
from benchmarks.chaos.program import Program
from benchmarks.chaos.targets import WorkerProcess

T = TypeVar("T")
#: Parts whose programs the injector restarts.
PARTS: Final[tuple[Part, ...]] = ("coordinator", "controller", "gateway")
_SIGNALS: Final[Mapping[Act, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "crash": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
}
_POLL_S: Final = 0.05
#: Seconds within which a program must end after SIGTERM.
_TERM_TIMEOUT_S: Final = 60.0
#: Retries of a fault while its targets restart, and seconds between them.
_TRIES: Final = 10
_AGAIN_S: Final = 1.0
#: Seconds within which a worker that is up has a running stream.
_BUSY_TIMEOUT_S: Final = 1.0
#: Longest wait for streams over HTTP, which begin late where the processors are busy.
_STREAMS_TIMEOUT_S: Final = 10.0
#: Seconds within which some request waits, because the clients never pause.
_TRIM_TIMEOUT_S: Final = 3.0


class Injector:
    """Breaks one process after another, each for its time."""

    def __init__(self, plant: Plant, history: HistoryWriter) -> None:
        self._plant = plant
        self._history = history
        # Due actions; the number breaks ties.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._holds: Counter[int] = Counter()  # active stops by process

    def play(self, faults: Sequence[Planned]) -> None:
        """Carry out the schedule; returns after the final repair."""
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

    def _strike(self, fault: Planned, tries: int = _TRIES) -> None:
        """Carry out a fault; retries while all targets are down, then records a miss."""
        strike = {
            "broker": self._strike_broker,
            "worker": self._strike_worker,
            "core": self._strike_core,
        }
        if strike.get(fault.kind[0], self._strike_program)(fault):
            return
        if tries > 1:
            self._later(_AGAIN_S, partial(self._strike, fault, tries - 1))
        else:
            self._history.write(Missed(now(), " ".join(fault.kind)))

    def _strike_worker(self, fault: Planned) -> bool:
        worker = _choose(self._busy_workers(), fault.which)
        return worker is not None and self._hit(fault, worker.host, [worker.pid])

    def _strike_core(self, fault: Planned) -> bool:
        """Its front ends with it."""
        worker = _choose([one for one in self._busy_workers() if one.core], fault.which)
        return worker is not None and self._hit(fault, worker.host, [worker.core], [worker.pid])

    def _busy_workers(self) -> list[WorkerProcess]:
        """Wait briefly for workers with running streams; returns all workers if there are none."""
        until = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            workers = self._plant.workers()
            ready = [one for one in workers if one.state == "ready"]
            free = [one for one in ready if not self._holds[one.pid]]
            busy = [one for one in free if self._plant.is_streaming(one)]
            if busy or time.monotonic() > until or not self._plant.broker.pid:
                return busy or free or ready or workers
            time.sleep(_POLL_S)

    def _strike_program(self, fault: Planned) -> bool:
        part, act = fault.kind
        program = _choose(self._candidates(part), fault.which)
        if program is None:
            return False
        if part == "gateway":
            self._wait_for_streams()
        pids = [program.pid]
        orphans = [one.pid for one in self._plant.workers() if one.host == program.name]
        if part == "host":
            pids += program.descendants()
        if not self._hit(fault, program.name, pids, [pid for pid in orphans if pid not in pids]):
            return False
        if act != "stop":
            since = time.monotonic() + fault.lasts_s
            self._later(fault.lasts_s, lambda: self._restart(program, pids[0], since))
        return True

    def _wait_for_streams(self) -> None:
        """Wait briefly until each gateway probably has streams under way."""
        until = time.monotonic() + _STREAMS_TIMEOUT_S
        while not self._plant.has_http_streams() and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _candidates(self, part: Part) -> list[Program]:
        """Running programs, preferably busy ones that are not stopped; gateways that serve."""
        running = [one for one in self._plant.programs(part) if one.pid]
        if part == "gateway":
            return [one for one in running if self._plant.answers(one)]
        if part in ("controller", "host"):
            serving = {one.host for one in self._plant.workers()}
            running = [one for one in running if one.name in serving] or running
        return [one for one in running if not self._holds[one.pid]] or running

    def _hit(
        self, fault: Planned, target: str, pids: Sequence[int], orphans: Sequence[int] = ()
    ) -> bool:
        """Signal processes; returns whether the first existed."""
        act = fault.kind[1]
        at = now()
        was_there = [_send(pid, _SIGNALS[act]) for pid in pids]
        if not was_there[0]:
            return False
        self._log(fault, target, pids, orphans, at)
        if act == "stop":
            self._holds.update(pids)
            self._later(fault.lasts_s, lambda: self._resume(pids))
        return True

    def _resume(self, pids: Sequence[int]) -> None:
        """End one stop of each process; a process continues after its last stop.

        Workers resume before their controller, which would tell them that they are fenced.
        """
        self._holds.subtract(pids)
        for pid in reversed(pids):
            if not self._holds[pid]:
                _send(pid, signal.SIGCONT)

    def _restart(self, program: Program, ended: int, since: float) -> None:
        """Restart a program after its old process has ended."""
        if program.pid == ended:
            if time.monotonic() - since > _TERM_TIMEOUT_S and not self._holds[ended]:
                raise RuntimeError(f"{program.name} does not end")
            self._later(_POLL_S, lambda: self._restart(program, ended, since))
            return
        program.start()

    def _strike_broker(self, fault: Planned) -> bool:
        broker = self._plant.broker
        if not broker.pid or self._holds[broker.pid]:
            return False
        if fault.kind[1] == "stop":
            return self._hit(fault, "broker", [broker.pid])
        if fault.kind[1] == "trim":
            return self._trim(fault)
        self._log(fault, "broker", [broker.pid])
        match fault.kind[1]:
            case "kill":
                broker.kill()
                self._later(fault.lasts_s, broker.start)
            case "term":
                broker.stop()
                self._later(fault.lasts_s, broker.start)
            case "cut":
                broker.cut_connections()
            case "flush":
                broker.flush_scripts()
        return True

    def _trim(self, fault: Planned) -> bool:
        """Delete waiting entries, which exist only while there is no leader."""
        leaders = [one.pid for one in self._plant.coordinators if one.pid]
        for pid in leaders:
            _send(pid, signal.SIGSTOP)
        self._holds.update(leaders)
        at, until = now(), time.monotonic() + _TRIM_TIMEOUT_S
        trimmed: list[Key] = []
        while not trimmed and time.monotonic() < until:
            with contextlib.suppress(redis.RedisError):
                trimmed = self._plant.trim_intakes()
            time.sleep(_POLL_S)
        self._resume(leaders)
        if trimmed:
            self._log(fault, "broker", [], at=at)
            self._history.write(*(Trimmed(now(), *key) for key in trimmed))
        return bool(trimmed)

    def _heal(self) -> None:
        """Start the programs that are down; at the end of the schedule, none is stopped."""
        self._plant.broker.start()
        for part in PARTS:
            for program in self._plant.programs(part):
                program.start()

    def _log(
        self,
        fault: Planned,
        target: str,
        pids: Sequence[int],
        orphans: Sequence[int] = (),
        at: float | None = None,
    ) -> None:
        kind = " ".join(fault.kind)
        self._history.write(Fault(at or now(), kind, target, list(pids), list(orphans)))


def _choose(items: Sequence[T], which: float) -> T | None:
    return items[int(which * len(items))] if items else None


def _send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; returns whether the process existed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
