"""The controller: owns the worker processes of one host.

It starts them, holds their leases from its own process, sees a death at once by the process's
sentinel and gives the lane up at once, kills what hangs, and stops everything in order.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import threading
import time
from multiprocessing.connection import wait

import redis

from tokenyard.bell import Bell
from tokenyard.connection import open_connection
from tokenyard.keys import Keys
from tokenyard.scripts import Scripts, Why
from tokenyard.settings import WorkerSettings
from worker.membership import Membership
from worker.messages import Beat, Drain, Drained, Failed, Fenced, Ready, Serve, Stop, ToController
from worker.slot import Slot, State

log = logging.getLogger("tokenyard.worker.controller")

TICK_S = 0.5
#: Time for a process that was told to stop to do so before it is killed.
STOP_S = 5.0


class Controller:
    """Keeps one process running in each slot and its worker registered in the yard."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._keys = Keys(settings.yard)
        self._connection = open_connection(settings.redis_url, retries=0)
        scripts = Scripts(self._connection, self._keys)
        self._lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._membership = Membership(scripts, settings.lease_ms, self._lose)
        self._slots = [Slot(settings, index) for index in range(settings.slots)]
        self._signals = 0
        self._looked_at = time.monotonic()  # when the slots were last judged
        # Interrupts the wait for the processes: by signals, and when a lease is lost.
        self._bell = Bell()

    def run(self) -> int:
        """Work until SIGTERM or SIGINT, or `stop`; the exit status.

        The first signal drains for at most ``grace_s``; the second stops at once.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        self._membership.start()
        while not self._signals:
            self.run_once()
        self._drain()
        self._stop_all()
        self._membership.stop()
        self._connection.close()
        self._bell.close()
        return 0

    def stop(self) -> None:
        """Drain and end `run`; called again, stop at once."""
        self._signals += 1
        self._bell.ring()

    def run_once(self) -> None:
        """One turn: start what is due, join what is ready, hear what happened."""
        self._start_due()
        self._join_ready()
        self._hear(self._until_due())
        self._kill_stuck()

    def _start_due(self) -> None:
        for slot in self._slots:
            if slot.state is State.DOWN and time.monotonic() >= slot.start_at:
                slot.start()

    def _join_ready(self) -> None:
        """Give every ready process without a place in the yard a place, and its lane."""
        while not self._lost.empty():
            self._rejoin(self._lost.get())
        for slot in self._slots:
            if slot.state is State.READY and not slot.worker:
                try:
                    slot.worker = self._membership.join(slot.roster_entry())
                except redis.RedisError as fault:
                    log.warning("slot %d cannot join: %s", slot.index, fault)
                    return
                slot.send(Serve(slot.worker))

    def _rejoin(self, worker: str) -> None:
        """A worker is fenced: it drops what it has and comes back under a new incarnation."""
        for slot in self._slots:
            if slot.worker == worker:
                log.warning("%s was fenced; joins anew", worker)
                self._membership.forget(worker)
                slot.worker = ""

    def _lose(self, worker: str) -> None:
        self._lost.put(worker)
        self._bell.ring()

    def _until_due(self) -> float:
        """Seconds until a process has to be started, at most one tick."""
        due = [slot.start_at for slot in self._slots if slot.state is State.DOWN]
        return min(TICK_S, max(0.0, min(due, default=math.inf) - time.monotonic()))

    def _hear(self, timeout_s: float) -> None:
        """Wait for a message, a death or the bell, at most so long."""
        pipes = {slot.pipe: slot for slot in self._slots if slot.pipe is not None}
        deaths = {slot.process.sentinel: slot for slot in self._slots if slot.process is not None}
        heard = wait([*pipes, *deaths, self._bell.fileno()], timeout=timeout_s)
        if self._bell.fileno() in heard:
            self._bell.hear()
        for slot in self._slots:
            for message in slot.receive():
                self._heed(slot, message)
        for sentinel, slot in deaths.items():
            if sentinel in heard:
                self._mourn(slot)

    def _heed(self, slot: Slot, message: ToController) -> None:
        match message:
            case Ready(info):
                slot.ready(info)
                log.info("slot %d: engine %s is up with %s", slot.index, info.engine, info.model)
            case Beat():
                slot.note_beat(message)
            case Fenced(worker):
                self._rejoin(worker)
            case Drained():
                slot.state = State.STOPPED if self._signals else slot.state
            case Failed(reason):
                log.error("slot %d: %s", slot.index, reason)
                slot.last_words = reason

    def _mourn(self, slot: Slot) -> None:
        """A process has died: its lane is given up before anything else."""
        departure = slot.departure()
        if slot.worker:
            self._leave(slot, *departure)
        status = slot.bury()
        pause = max(0.0, slot.start_at - time.monotonic())
        log.warning("slot %d: process died (%s); next in %.1f s", slot.index, status, pause)

    def _leave(self, slot: Slot, why: Why, reason: str = "") -> None:
        try:
            self._membership.leave(slot.worker, why, reason)
        except redis.RedisError as fault:
            log.warning("%s: its lease has to run out: %s", slot.worker, fault)
        slot.worker = ""

    def _kill_stuck(self) -> None:
        now = time.monotonic()
        unheard_s, self._looked_at = now - self._looked_at - TICK_S, now
        for slot in self._slots:
            # A host that was suspended must not find all its engines hanging.
            if unheard_s > TICK_S:
                slot.excuse(unheard_s)
            if slot.fault:
                log.error("slot %d: killed: %s", slot.index, slot.fault)
                slot.last_words = slot.fault
                slot.kill()

    def _drain(self) -> None:
        """Let running requests finish, for at most the grace; new ones go elsewhere."""
        until = time.monotonic() + self._settings.grace_s
        for slot in self._slots:
            if slot.state is State.READY:
                slot.state = State.DRAINING
                if slot.worker:
                    self._membership.show(slot.worker, slot.roster_entry())
                slot.send(Drain())
        while self._signals == 1 and time.monotonic() < until and self._is_draining():
            self._hear(TICK_S)
            self._kill_stuck()

    def _is_draining(self) -> bool:
        return any(slot.state is State.DRAINING for slot in self._slots)

    def _stop_all(self) -> None:
        """Stop the processes, then hand back what they had not finished."""
        for slot in self._slots:
            slot.send(Stop())
            if slot.state is State.STARTING:
                slot.kill()
        until = time.monotonic() + STOP_S
        for slot in self._slots:
            if slot.process is None:
                continue
            slot.process.join(max(0.0, until - time.monotonic()))
            slot.kill()
            if slot.worker:
                self._leave(slot, "left")
            slot.bury()
