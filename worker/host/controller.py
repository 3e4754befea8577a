"""The controller: connects the worker processes of one host to the yard.

The pool keeps the processes alive and brings models onto devices. The controller registers each
process as a worker, renews the leases, runs commands, and releases a lane immediately when its
process dies.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import signal
import threading
from typing import Any

import redis

from tokenyard import clock
from tokenyard.broker.connection import BLOCK_MARGIN_S, open_connection
from tokenyard.broker.outage import Outage
from tokenyard.process.embedding import ServiceAddress, started_address
from tokenyard.process.service_manager import ServiceManager
from tokenyard.protocol.control import (
    Acknowledgement,
    Command,
    DesiredStates,
    Order,
    decode_desired,
)
from tokenyard.protocol.errors import SettingsError, StartFailed
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import WorkerInfo
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Why
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health
from tokenyard.telemetry.tracing import Tracer
from worker import messages
from worker.engines.devices import with_device
from worker.host.allocation import Goal, fits
from worker.host.catalog import HostEntry, read_catalog
from worker.host.commands import CommandHandler, CommandReader
from worker.host.diagnosis import FailedStart, StartFailures, paragraph
from worker.host.membership import Membership, roster_entry
from worker.host.metrics import HostMetrics
from worker.host.output import log_place
from worker.host.pool import Pool
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.host.reconciler import StateReconciler

log = logging.getLogger("tokenyard.worker.controller")

#: From another thread: a command or signal and its entry id; a worker that has lost its lease; or
#: None when the server is back and may have lost writes.
Received = tuple[str, Command | Order] | str | None


class Controller:
    """Runs this host's pool and keeps its workers registered in the yard."""

    def __init__(self, settings: WorkerSettings, manager: ServiceManager | None = None) -> None:
        """``manager`` is the service manager that is notified, if there is one."""
        self._manager = manager or ServiceManager({})
        self._catalog = read_catalog(settings)  # its errors come before the search for a device
        self._settings = settings = with_device(settings)
        self._connection = open_connection(settings.redis_url, retries=0)
        self._keys = keys = Keys(settings.yard)
        self._scripts = Scripts(Yard(self._connection, keys))
        self._host = HostEntry(settings, self._catalog)
        self._received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._membership = Membership(self._scripts, settings.lease_ms, self._put)
        timeout_s = settings.block_ms / 1000 + BLOCK_MARGIN_S
        listening = open_connection(settings.redis_url, timeout_s=timeout_s, retries=0)
        self._reader = CommandReader(Yard(listening, keys), self._put, settings.block_ms)
        self._pool = Pool(settings, self)
        self._commands = CommandHandler(settings, self._pool, self._catalog, self._acknowledge)
        self._reconciler = StateReconciler(self._pool, self._read_desired, self._acknowledge)
        Tracer("", "", settings.otlp_endpoint).check()  # once here, not in each process
        self._outage = Outage(log, "joining the yard")
        self._swapped_ms: dict[int, int] = {}  # by device: the last change of model
        self._releasing: dict[str, str] = {}  # by process: the model that it releases
        names = [member.name for member in self._pool.members]
        self._metrics = HostMetrics(names, self._catalog.keys())
        self._health = Health(settings.liveness_timeout_s)
        self._endpoint: Endpoint | None = None
        if settings.metrics_port:
            self._endpoint = Endpoint(
                self._metrics, self._health, settings.metrics_host, settings.metrics_port
            )
        self._signals = 0
        self._start_failures = StartFailures(settings.max_start_failures)

    def run(self) -> int:
        """Run until SIGTERM, SIGINT or `stop`, or until all processes are closed for good.

        Returns the exit status. The first signal drains for at most ``grace_s``, the second stops
        immediately. Raises `StartFailed` if no process can start, unless it shall retry forever.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        hopeless = ""
        self._start()
        while not self._signals and not self._pool.is_closed and not hopeless:
            self._manager.alive()
            self.run_once()
            self._health.turned(self._why_unready())
            hopeless = self._judge_starts()
        self._manager.stopping()
        self._health.stopping()
        self._pool.drain(lambda: self._signals > 1)
        self._reader.stop()
        self._pool.stop()
        self._membership.stop()
        if self._endpoint:
            self._endpoint.stop()
        self._connection.close()
        if hopeless:
            raise StartFailed(hopeless)
        return 0

    def stop(self) -> None:
        """Drain and end `run`; called again, stop immediately."""
        self._signals += 1
        self._pool.wakeup.set()

    def _start(self) -> None:
        if self._endpoint:
            self._endpoint.start()
        self._pool.start()
        self._reconciler.refresh()
        self._membership.publish(self._host.info)
        self._membership.start()
        self._reader.start()
        if not self._settings.models:
            (spec,) = self._catalog.values()
            for device in range(self._settings.slots):
                self._pool.aim(spec, [device])

    def run_once(self) -> None:
        """One turn: run commands, register workers, and let the pool take its turn."""
        self._take_received()
        self._join_all()
        self._reconcile_all()
        self._pool.run_once()
        self._count_all()

    def _why_unready(self) -> str:
        """Why no worker of this host can take a request; empty if one can.

        With a models file a warm process counts as well: it loads what is requested.
        """
        usable = {State.READY, State.WARM} if self._settings.models else {State.READY}
        members = self._pool.members
        if any(one.worker and one.state in usable for one in members):
            return ""
        return "no worker is ready: " + ", ".join(f"{m.name} is {m.state.value}" for m in members)

    def _judge_starts(self) -> str:
        """Log what has failed often; returns why this host should end, or ""."""
        failed = self._start_failures
        starting = (State.WARMING, State.LOADING)
        pending = {one.name for one in self._pool.members if one.state in starting} - failed.failed
        failure = failed.enough(is_pending=bool(pending))
        if failure is None:
            return ""
        told = paragraph(failure, log_place())
        if failure.is_hopeless and self._settings.on_start_failure == "exit":
            return told
        log.error("%s", " ".join(line.strip() for line in told.splitlines()))
        return ""

    # Registration in the yard

    def _join_all(self) -> None:
        """Register every process that has no worker in the yard.

        A process in a crash loop is registered too, so that everybody sees that it has failed.
        """
        for member in self._pool.members:
            is_shown = member.process is not None or member.is_in_crash_loop
            if (member.worker and not member.has_released_lane) or not is_shown:
                continue
            if not self._join(member, "it was paused"):
                return

    def _join(self, member: WorkerProcessHandle, why: str) -> bool:
        """Register a process under a new incarnation; returns whether that succeeded.

        The old incarnation leaves afterwards: a signal may wait for all workers, so none may be
        missing for a moment. The entry already shows the right run state.
        """
        before = member.worker
        try:
            self._reconciler.read()
            self._reconciler.advance(member)
            member.set_worker(self._membership.join(self._entry(member)))
        except redis.RedisError as error:
            self._outage.note(error)
            return False
        self._outage.over()
        member.has_released_lane = False
        if before:
            self._leave_as(before, "left", why)
        return True

    def _reconcile_all(self) -> None:
        """Bring every process to its desired state, and give lanes to those that may serve."""
        self._reconciler.refresh()
        for member in self._pool.members:
            if self._reconciler.advance(member) and member.worker:
                self._membership.show(member.worker, self._entry(member))
            is_new = member.worker != member.served
            if member.worker and is_new and self._reconciler.may_serve(member):
                member.served = member.worker
                member.send(messages.Serve(member.worker))
        self._pool.suspended = self._reconciler.suspended()
        self._pool.weights = self._reconciler.weights()
        if forgiven := self._host.forgive(self._reconciler.weights_of):  # they have other weights
            self._membership.publish(self._host.info)
            self._pool.retry_now(forgiven)

    def _count_all(self) -> None:
        """Show the workers' statistics in the roster."""
        for one in self._pool.members:
            if one.worker:
                self._membership.count(one.worker, one.tally, one.last_error, one.last_error_ms)

    def _leave_behind(self, worker: str) -> None:
        """A worker is fenced: its process drops its requests and gets a new incarnation."""
        for member in self._pool.members:
            if member.worker == worker:
                log.warning("%s was fenced; joins again", worker)
                self._membership.forget(worker)
                member.set_worker("")

    def _entry(self, member: WorkerProcessHandle) -> WorkerInfo:
        group = self._group_of(member)
        swapped_ms = self._swapped_ms.get(member.device, 0)
        return roster_entry(member, self._settings.name, group, swapped_ms)

    def _group_of(self, member: WorkerProcessHandle) -> list[str]:
        """Names of its group, the leader's first."""
        mates = [mate for mate in self._pool.members if mate.is_mate_of(member)]
        return [mate.name for mate in sorted(mates, key=lambda m: m.group.rank if m.group else 0)]

    def _leave(self, member: WorkerProcessHandle, why: Why, reason: str = "") -> None:
        if member.worker:
            self._leave_as(member.worker, why, reason)
        member.set_worker("")
        member.has_released_lane = False

    def _leave_as(self, worker: str, why: Why, reason: str) -> None:
        try:
            self._membership.leave(worker, why, reason)
        except redis.RedisError as error:
            log.warning("%s: its lease must expire: %s", worker, error)

    # PoolListener

    def changed(self, member: WorkerProcessHandle) -> None:
        """See `PoolListener`."""
        if member.state is State.WARM:
            self._start_failures.worked("warming up")
        if member.worker:
            self._membership.show(member.worker, self._entry(member))
        self._note_end(member)
        self._metrics.changed(member)
        self._commands.changed(member)

    def serves(self, member: WorkerProcessHandle) -> None:
        """See `PoolListener`; the process gets its lane once it is in its desired state."""
        self._start_failures.worked("loading the model")
        self._note_load(member)
        self.changed(member)
        goal = self._pool.goals[member.device]
        if goal and fits(member, goal):
            self._commands.reached(goal)

    def _note_load(self, member: WorkerProcessHandle) -> None:
        if member.spec:
            is_woken, seconds = "wake" in member.phases_s, sum(member.phases_s.values())
            note = self._host.came if is_woken else self._host.loaded
            note(member.spec.name, seconds)
            self._membership.publish(self._host.info)

    def _note_end(self, member: WorkerProcessHandle) -> None:
        """Note how long a model took to unload or fall asleep."""
        if member.state in (State.WARM, State.ASLEEP) and member.name in self._releasing:
            self._host.gone(self._releasing.pop(member.name), sum(member.phases_s.values()))

    def gives_way(self, member: WorkerProcessHandle) -> None:
        """See `PoolListener`; an incarnation serves at most one model, so it ends."""
        why = "its model gives way"
        if member.worker and not self._join(member, why):
            self._leave(member, "left", why)
        if member.spec and member.is_awake:
            self._releasing[member.name] = member.spec.name
        goal = self._pool.goals[member.device]
        if goal and goal.spec is not member.spec and member.is_awake:
            self._swapped_ms.update(dict.fromkeys(member.devices, clock.wall_ms()))

    def died(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        """See `PoolListener`: the lane of the process is released immediately."""
        self._leave(member, why, reason)
        self._releasing.pop(member.name, None)
        self._metrics.ended(member, why)
        member.note_error("" if why == "left" else reason)
        self._commands.died(member, reason)

    def start_failed(self, member: WorkerProcessHandle, death: FailedStart) -> None:
        """See `PoolListener`; models of a file are placed elsewhere and do not end this host."""
        if death.phase == "warming up" or not self._settings.models:
            self._start_failures.note(member.name, death)

    def failed(self, goal: Goal, reason: str, *, is_lost: bool = False) -> bool:
        """See `PoolListener`; the only model of a host is tried again, with pauses.

        The coordinator orders another one again if requests still wait for it, or it is pinned.
        """
        name = goal.spec.name
        self._host.load_failed(name, reason, self._pool.weights.get(name, ""), is_lost=is_lost)
        self._membership.publish(self._host.info)
        self._commands.missed(goal, reason)
        return not self._settings.models

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """See `PoolListener`."""
        self._commands.refused(member, reason)

    def heard(self, member: WorkerProcessHandle, message: messages.ToController) -> None:
        """See `PoolListener`."""
        match message:
            case messages.Heartbeat():
                self._metrics.heard(member, message)
            case messages.Fenced(worker):
                self._leave_behind(worker)
            case messages.LaneReleased(worker) if worker == member.worker:
                member.has_released_lane = True
            case messages.Done(errand):
                member.observed.did(errand)
            case messages.CommandRefused(reason, messages.EngineCommand() as errand):
                log.error("%s: %s", member.name, reason)
                member.observed.cannot(errand, reason)

    # Commands, signals and lost leases

    def _put(self, received: Received) -> None:
        self._received.put(received)
        self._pool.wakeup.set()

    def _take_received(self) -> None:
        while not self._received.empty():
            match self._received.get():
                case str(worker):
                    self._leave_behind(worker)
                case None:
                    self._reconciler.mark_stale()
                case entry, Order() as order:
                    self._reconciler.handle(entry, order)
                case entry, Command() as command:
                    self._commands.run(entry, command)

    def _read_desired(self) -> DesiredStates:
        fields: Any = self._connection.hgetall(self._keys.desired)
        return decode_desired(fields)

    def _acknowledge(self, entry: str, worker: str, reason: str) -> None:
        """Report that a command or signal is carried out, or the reason why it cannot be."""
        outcome = Acknowledgement(worker=worker, done=not reason, reason=reason)
        try:
            self._scripts.acknowledge(entry, outcome)
        except redis.RedisError as error:
            log.warning("command %s could not be acknowledged: %s", entry, error)


# A controller in a process of another program, which reports when its workers are up.

#: States of a worker that is up, with a single model.
_HOLDING = frozenset({State.READY, State.ATTACHED})
#: States of a worker that is up, with a models file: models load on demand.
_WARM = frozenset({State.WARM, State.LOADING, *_HOLDING})


class EmbeddedController(Controller):
    """A controller that another thread can wait for."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises `SettingsError` in a daemonic process, which cannot have children."""
        if multiprocessing.current_process().daemon:
            raise SettingsError(
                ["a controller starts processes, so its own must not be made with daemon=True"]
            )
        super().__init__(settings)
        self._ready = threading.Event()

    def run_once(self) -> None:
        """Run one turn, then check whether every device has its worker."""
        super().run_once()
        if not self._ready.is_set() and self._is_up():
            self._ready.set()

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until every device has a worker that is up and in the yard."""
        return clock.wait(self._ready, timeout_s)

    def address(self) -> ServiceAddress:
        """The address of this controller."""
        workers = tuple(member.worker for member in self._pool.members if member.worker)
        return started_address("worker", self._settings, workers=workers)

    def _is_up(self) -> bool:
        wanted = _WARM if self._settings.models else _HOLDING
        up = {one.device for one in self._pool.members if one.worker and one.state in wanted}
        return up >= self._pool.goals.keys() - self._pool.closed
