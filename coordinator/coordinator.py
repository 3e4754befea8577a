"""The coordinator process: leads the yard, or stands by until it may."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading

import redis

from coordinator.dispatch.admission import Admission
from coordinator.dispatch.dispatcher import Dispatcher
from coordinator.dispatch.intake import Intake
from coordinator.dispatch.lane_scanner import LaneScanner
from coordinator.dispatch.waits import QueueSpans
from coordinator.handshake import Handshake, Models, TenantPresence
from coordinator.leadership import Leadership
from coordinator.placement.placer import Placer
from coordinator.recovery.cancels import CancelRequests
from coordinator.recovery.failover import ClockSteps, FailoverDetector
from coordinator.recovery.reconciler import LedgerReconciler
from coordinator.recovery.rescuer import Rescuer
from coordinator.recovery.sweeper import Sweeper
from coordinator.recovery.trial_monitor import ReloadTimeouts, TrialMonitor
from coordinator.recovery.usage_pruner import UsagePruner
from coordinator.roster import Roster
from coordinator.routing.prefixes import Cache
from coordinator.routing.selection import Selection
from coordinator.telemetry.counts import CoordinatorCounts
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.telemetry.reports import HistoryRecorder, publish_demand
from tokenyard import clock
from tokenyard.broker.connection import BLOCK_MARGIN_S, open_connection
from tokenyard.broker.outage import Outage
from tokenyard.process.embedding import ServiceAddress, started_address
from tokenyard.process.service_manager import ServiceManager
from tokenyard.process.wake_pipe import WakeupPipe
from tokenyard.protocol.keys import INTAKE_CLASSES, Keys, Yard
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.texts import counted
from tokenyard.scripts import Scripts
from tokenyard.scripts.calls import LostLeadership, load_scripts
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health
from tokenyard.telemetry.tracing import Tracer

log = logging.getLogger("tokenyard.coordinator")


class Coordinator:
    """Assigns requests to workers and takes back what lost workers held.

    It has no state that Redis does not have: after a takeover everything is read again. One thread
    does all the work, one bounded turn at a time.
    """

    def __init__(
        self, settings: CoordinatorSettings, manager: ServiceManager | None = None
    ) -> None:
        """``manager`` is notified of its progress."""
        self._settings = settings
        self._manager = manager or ServiceManager({})
        self._health = Health(settings.liveness_timeout_s)
        self._is_stopped = False
        self._ready = threading.Event()
        self._wakeup = WakeupPipe()
        self._keys = keys = Keys(settings.yard)
        # Without retries: who waits for its server must know, see `_forget_connection`.
        self._connection = connection = open_connection(
            settings.redis_url, timeout_s=settings.block_ms / 1000 + BLOCK_MARGIN_S, retries=0
        )
        yard = Yard(connection, keys, settings.redis_url)
        self._scripts = scripts = Scripts(
            yard, reply_maxlen=settings.reply_maxlen, dead_maxlen=settings.dead_maxlen
        )
        self._counts = counts = CoordinatorCounts()
        self._tracer = Tracer("tokenyard-coordinator", settings.name, settings.otlp_endpoint)
        self._roster = roster = Roster(yard)
        self._clock_steps = ClockSteps(scripts, roster.broker_time)
        self._leadership = Leadership(scripts, settings.name, settings.lease_ms)
        self._models = Models()
        self._tenants = TenantPresence(yard)
        self._handshake = Handshake(scripts, settings, self._models, self._tenants, counts)
        self._intake = Intake(yard, settings)
        self._selection = Selection(settings)
        spans = QueueSpans(self._tracer, settings.yard)
        self._dispatcher = Dispatcher(
            scripts,
            self._intake,
            roster,
            Admission(
                settings,
                self._models,
                features_of=self._selection.features_of,
                trace_of=spans.trace_of,
                shift_of=self._clock_steps.shift_ms,
            ),
            self._selection,
            settings,
            counts=counts,
            spans=spans,
        )
        self._lane_scanner = LaneScanner(yard, roster, self._selection)
        self._placer = Placer(
            scripts, roster, self._dispatcher, settings, counts, self._selection.record
        )
        self._failover = FailoverDetector(scripts)
        self._rescuer = Rescuer(scripts, roster, counts)
        self._trial_monitor = TrialMonitor(
            scripts, roster, settings, has_suspects=self._dispatcher.has_suspects
        )
        self._reload_timeouts = ReloadTimeouts(scripts, roster)
        self._sweeper = Sweeper(
            scripts,
            settings,
            counts,
            clock_steps=self._clock_steps,
            broker_time=roster.broker_time,
            answer=lambda entry, refused: self._dispatcher.answer(
                self._leadership.token, entry, refused
            ),
        )
        self._reconciler = LedgerReconciler(
            scripts,
            roster.broker_time,
            counts,
            patience_s=settings.lost_entry_wait_s,
            on_returned=self._intake.tenants.miss,
        )
        self._cancels = CancelRequests(scripts, counts)
        self._recorder = HistoryRecorder(scripts, roster, counts)
        self._usage_pruner = UsagePruner(yard, roster.broker_time)
        # A leader that only waits must still renew its lease in time.
        self._block_ms = min(settings.block_ms, settings.lease_ms // 3)
        self._prepared_for = ""  # the token of the term that is prepared
        self._has_loaded = False  # the scripts, into the server that it is connected to
        self._is_complete = settings.expect_workers == 0
        self._endpoint: Endpoint | None = None
        if settings.metrics_port:
            metrics = CoordinatorMetrics(
                counts, settings.redis_url, keys, lambda: self._leadership.token
            )
            self._endpoint = Endpoint(
                metrics,
                self._health,
                settings.metrics_host,
                settings.metrics_port,
                {"/scale": metrics.scale},
            )

    # The process

    def run(self) -> int:
        """Work until SIGTERM or SIGINT, or until `stop`; the exit status."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        self._tracer.start()
        if self._endpoint:
            self._endpoint.start()
        outage = Outage(log, f"yard {self._settings.yard}")
        while not self._is_stopped:
            self._manager.alive()
            try:
                self.run_once()
                self._health.turned()
                outage.over()
            except LostLeadership:
                self._leadership.lose()
            except redis.RedisError as error:
                pause_s = outage.note(error)
                self._forget_connection()
                self._health.turned(f"no usable broker: {error}")
                self._wakeup.wait(pause_s)
        self._manager.stopping()
        self._health.stopping()
        self._close()
        return 0

    def stop(self) -> None:
        """End `run` after the current turn; idempotent, also before `run`."""
        self._is_stopped = True
        self._wakeup.set()

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until it leads or stands by."""
        return clock.wait(self._ready, timeout_s)

    def address(self) -> ServiceAddress:
        """Where it is, and whether it leads."""
        epoch = self._leadership.token.partition(":")[0]
        return started_address("coordinator", self._settings, epoch=int(epoch) if epoch else 0)

    def _forget_connection(self) -> None:
        """The connection broke, and what was read may have been lost on the way."""
        self._prepared_for = ""
        self._has_loaded = False
        self._rescuer.note_disconnected()

    def _close(self) -> None:
        with contextlib.suppress(redis.RedisError):
            self._leadership.resign()
        self._selection.close()
        if self._endpoint:
            self._endpoint.stop()
        self._tracer.stop()
        self._connection.close()

    # One turn

    def run_once(self) -> None:
        """One turn: keep the lead, read the roster, rescue, place models, dispatch."""
        if not self._has_loaded:
            # Before it leads: a server that refuses writes has no leader, and clients call a
            # script to learn that.
            self._load_scripts()
            self._has_loaded = True
        leads = self._leadership.keep()
        self._rescuer.note_contact()
        if not leads:
            self._prepared_for = ""
            self._roster.measure_time()
            self._ready.set()
            self._wakeup.wait(min(0.5, self._settings.lease_ms / 10_000))
            return
        token = self._leadership.token
        self._take_over(token)
        self._follow_roster(token)
        self._reload_timeouts.run_once()
        self._rescuer.run_once(token)
        self._trial_monitor.run_once(token)
        self._sweeper.run_once()
        if self._dispatcher.has_missed:
            self._reconciler.hurry()
        self._reconciler.run_once(token)
        self._cancels.run_once(is_woken=self._intake.is_cancelling)
        self._follow_tenants(token)
        self._recorder.run_once(token)
        self._usage_pruner.run_once(token)
        if self._is_complete:
            self._placer.run_once(token)
        self._dispatcher.run_once(token, may_place=self._is_complete, block_ms=self._patience_ms())

    def _take_over(self, token: str) -> None:
        """Once for each term of leadership: publish the handshake, and read all that waits."""
        if self._prepared_for == token:
            return
        self._tenants.hurry()
        self._tenants.refresh()
        self._publish_handshake(token)
        self._check_server(token)
        self._intake.read_again()
        self._lane_scanner.begin()
        self._reconciler.begin()
        self._clock_steps.begin()
        self._roster.mark_stale()
        self._prepared_for = token
        self._ready.set()

    def _load_scripts(self) -> None:
        """Clients may not load them; a new server process, or one after SCRIPT FLUSH, has none."""
        if loaded := load_scripts(self._connection):
            log.info("loaded %s into the server", counted(loaded, "script"))

    def _check_server(self, token: str) -> None:
        """A connection may lead to another server without an error."""
        if self._failover.check(token):
            self._roster.mark_stale()
            self._intake.read_again()  # its clock may be behind

    def _publish_handshake(self, token: str) -> None:
        self._handshake.publish(
            token,
            waiting_clients=self._intake.backlog.clients,
            rate_per_s=self._dispatcher.rate.per_s,
        )
        self._counts.know(self._models.bases)

    def _follow_tenants(self, token: str) -> None:
        """Publish whether the yard has tenants, when that changes."""
        if self._intake.tenants.take_changed():
            self._tenants.hurry()
        if self._tenants.refresh():
            self._publish_handshake(token)

    def _follow_roster(self, token: str) -> None:
        """Read the roster when that is due, and whatever depends on it."""
        if not self._roster.refresh():
            return
        intakes = {*INTAKE_CLASSES, *self._intake.backlog.intakes}
        if self._clock_steps.run_once(token, intakes, self._roster.longest_lease_ms):
            self._intake.read_again()
            self._roster.mark_stale()
            self._roster.refresh()  # by the leases that were moved
        self._check_server(token)
        self._load_scripts()
        self._roster.forget_hosts()
        self._follow_lanes()
        roster = self._roster
        if self._models.learn(roster.bases(), roster.servable, roster.output_defaults()):
            self._publish_handshake(token)
            self._intake.read_again()  # to admit it by the new models
        elif self._dispatcher.rate.measure(clock.monotonic()) or not self._handshake.is_published:
            self._publish_handshake(token)
        self._intake.compare()
        publish_demand(self._scripts, token, self._intake.backlog.by_model(), roster)
        self._start_when_complete()

    def _follow_lanes(self) -> None:
        """Forget the prefixes of workers that have left, and weigh unknown lanes."""
        if self._selection.is_affine:
            members = self._roster.members.items()
            caches = {w: Cache(m.info.cache_tokens, m.info.weights) for w, m in members if m.serves}
            self._selection.follow(caches)
        self._lane_scanner.run_once()

    def _start_when_complete(self) -> None:
        """Begin to dispatch once the expected workers have joined."""
        joined = self._roster.joined()
        if self._is_complete or len(joined) < self._settings.expect_workers:
            return
        self._is_complete = True
        self._selection.start_when_complete(self._roster.worker_order())
        log.info("%s joined", counted(len(joined), "worker"))

    def _patience_ms(self) -> int:
        """How long this turn may wait for something to read."""
        services = (self._rescuer, self._sweeper, self._cancels, self._reconciler)
        if any(service.has_more for service in services):
            return 0
        patience_s = min(self._placer.patience_s, self._trial_monitor.patience_s)
        return math.ceil(min(self._block_ms, 1000 * patience_s))
