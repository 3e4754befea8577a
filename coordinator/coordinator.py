"""The coordinator process: leads the yard, or stands by until it may."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

import msgspec
import redis
from redis.backoff import ExponentialWithJitterBackoff

from coordinator.counts import CoordinatorCounts
from coordinator.dispatch.dispatcher import Dispatcher, LostLeadership
from coordinator.dispatch.intake import Intake
from coordinator.dispatch.lane_scanner import LaneScanner
from coordinator.dispatch.models import Models
from coordinator.dispatch.shares import by_arrival, by_client_and_guest
from coordinator.dispatch.spans import QueueSpans
from coordinator.dispatch.validator import RequestValidator
from coordinator.failover import FailoverDetector
from coordinator.guests.cancels import CancelRequests
from coordinator.guests.inboxes import Inboxes
from coordinator.history import RetryLimits
from coordinator.leadership import Leadership
from coordinator.metrics import CoordinatorMetrics
from coordinator.placement.placer import Placer
from coordinator.recovery.reconciler import LedgerReconciler
from coordinator.recovery.reload_timeouts import ReloadTimeouts
from coordinator.recovery.rescuer import Rescuer
from coordinator.recovery.sweeper import Sweeper, bounds_by_class
from coordinator.recovery.trial_monitor import TrialMonitor
from coordinator.roster import Roster
from coordinator.routing.prefixes import Cache
from coordinator.routing.selection import Selection
from coordinator.routing.suspicion import TrialLimits
from tokenyard.broker.connection import BLOCK_MARGIN_S, open_connection
from tokenyard.broker.outage import Outage
from tokenyard.process.embedding import ServiceAddress, started_address
from tokenyard.process.service_manager import ServiceManager
from tokenyard.process.wake_pipe import WakeupPipe
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.receipts import mark_of
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.texts import counted
from tokenyard.protocol.wire import WIRE_VERSION
from tokenyard.scripts import RESCUE_NOT_LEADER, Arg, Scripts, load_scripts
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health
from tokenyard.telemetry.tracing import Tracer

log = logging.getLogger("tokenyard.coordinator")

#: After a (re)connection, leases that have run out are left alone for so long: their owners may
#: have been cut off by the same fault and are about to renew.
RESCUE_GRACE_S = 3.0
#: A server that was silent for so long counts as a connection that broke, too.
SILENCE_S = 2.0


class Coordinator:
    """Assigns requests to workers and takes back what lost workers held.

    It keeps no state that Redis does not have: what it holds in memory is read again after a
    takeover. One thread does everything, one bounded turn at a time.
    """

    def __init__(
        self, settings: CoordinatorSettings, manager: ServiceManager | None = None
    ) -> None:
        """``manager`` hears how it gets on, if there is one."""
        self._settings = settings
        self._manager = manager or ServiceManager()
        self._health = Health(settings.liveness_timeout_s)
        self._is_stopped = False
        self._ready = threading.Event()
        self._keys = Keys(settings.yard)
        # Without retries: a repeated read would not give again what the first one took.
        self._connection = open_connection(
            settings.redis_url, timeout_s=settings.block_ms / 1000 + BLOCK_MARGIN_S, retries=0
        )
        self._scripts = Scripts(
            self._connection,
            self._keys,
            reply_maxlen=settings.reply_maxlen,
            dead_maxlen=settings.dead_maxlen,
        )
        self._wakeup = WakeupPipe()
        self._counts = CoordinatorCounts()
        self._tracer = Tracer("tokenyard-coordinator", settings.name, settings.otlp_endpoint)
        self._roster = Roster(self._connection, self._keys)
        self._leadership = Leadership(
            self._scripts, settings.name, settings.lease_ms, self._read_leader
        )
        self._rescuer = Rescuer(
            self._connection,
            self._scripts,
            self._keys,
            on_moved=self._count_moved,
            slots_of=self._slots_of,
        )
        self._intake = Intake(
            self._connection,
            self._keys,
            max_batch=settings.max_batch,
            max_held=settings.max_held,
            turn_of=by_arrival if settings.deterministic else by_client_and_guest(settings.guests),
        )
        self._models = Models()
        self._selection = Selection(settings)
        self._dispatcher = Dispatcher(
            self._scripts,
            self._intake,
            self._roster,
            RequestValidator(
                max_request_bytes=settings.max_request_bytes,
                limits=RetryLimits(
                    max_crashes=settings.max_crashes,
                    max_crashed_alone=settings.max_crashed_alone,
                    max_lost_alone=settings.max_lost_alone,
                    max_faults=settings.max_faults,
                ),
                models=self._models,
            ),
            self._selection,
            max_batch=settings.max_batch,
            max_trial_share=settings.max_trial_share,
            counts=self._counts,
            spans=QueueSpans(self._tracer, settings.yard),
        )
        self._hearings = TrialMonitor(
            self._connection,
            self._scripts,
            self._keys,
            self._roster,
            TrialLimits(settings.trial_tokens, 1000 * settings.trial_s),
            has_suspects=self._dispatcher.has_suspects,
        )
        self._trials = ReloadTimeouts(self._scripts, self._roster)
        self._placer = Placer(
            self._scripts,
            self._roster,
            self._dispatcher,
            settings,
            self._selection.record,
            self._counts,
        )
        self._sweeper = Sweeper(
            self._connection,
            self._scripts,
            self._keys,
            bounds=bounds_by_class(settings),
            answer=lambda entry, refused: self._dispatcher.answer(
                self._leadership.token, entry, refused
            ),
            found_bad=self._counts.found_bad,
        )
        self._reconciler = LedgerReconciler(
            self._scripts,
            patience_s=settings.lost_entry_wait_s,
            clock=self._roster.server_ms,
            ended=lambda intake: self._counts.answered("", intake, Code.ENTRY_LOST, is_dead=False),
        )
        self._recall = LaneScanner(self._connection, self._keys, self._roster, self._selection)
        self._promotion = FailoverDetector(self._connection, self._scripts)
        self._cancels = CancelRequests(
            self._connection, self._scripts, self._keys, self._counts.found_bad
        )
        self._inboxes = Inboxes(self._connection, self._scripts, self._keys, settings, self._counts)
        # A leader that only waits must still renew its lease in time.
        self._block_ms = min(settings.block_ms, settings.lease_ms // 3)
        self._prepared_for = ""
        self._has_loaded = False  # the scripts, into the server that it is connected to
        self._heard_at = -math.inf  # monotonic; when the server answered last
        self._quiet_until = 0.0
        self._complete = settings.expect_workers == 0
        self._backlog = 0  # entries of lost workers that the rescuer has yet to move
        self._endpoint: Endpoint | None = None
        if settings.metrics_port:
            metrics = CoordinatorMetrics(
                self._counts, settings.redis_url, self._keys, lambda: self._leadership.token
            )
            self._endpoint = Endpoint(
                metrics, self._health, settings.metrics_host, settings.metrics_port
            )

    def run(self) -> int:
        """Work until SIGTERM or SIGINT, or until `stop`; the exit status."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        self._selection.start()
        self._tracer.start()
        if self._endpoint:
            self._endpoint.start()
        backoff, failures = ExponentialWithJitterBackoff(cap=2.0, base=0.05), 0
        outage = Outage(log, f"yard {self._settings.yard}")
        while not self._is_stopped:
            self._manager.alive()
            try:
                self.run_once()
                failures = 0
                self._health.turned()
                outage.over()
            except LostLeadership:
                self._leadership.lose()
            except redis.RedisError as error:
                failures += 1
                outage.note(error)
                self._recover()
                self._health.turned(f"no usable broker: {error}")
                self._wakeup.wait(backoff.compute(failures))
        self._manager.stopping()
        self._health.stopping()
        self._close()
        return 0

    def stop(self) -> None:
        """End `run` after the turn that is under way; idempotent, also before `run`."""
        self._is_stopped = True
        self._wakeup.set()

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until it leads or stands by."""
        return self._ready.wait(timeout_s)

    def address(self) -> ServiceAddress:
        """Where it is, and whether it leads."""
        epoch = self._leadership.token.partition(":")[0]
        return started_address(
            "coordinator", self._settings, os.getpid(), epoch=int(epoch) if epoch else 0
        )

    def run_once(self) -> None:
        """One turn: keep the lead, know the workers, rescue, dispatch."""
        if not self._has_loaded:
            # Before it leads: a server that takes no writes lets nobody lead, and clients call a
            # script to learn that.
            self._load_scripts()
            self._has_loaded = True
        if not self._keep_lead():
            self._prepared_for = ""
            self._ready.set()
            self._wakeup.wait(min(0.5, self._settings.lease_ms / 10_000))
            return
        self._take_over()
        self._follow_roster()
        self._trials.run_once()
        self._rescue()
        self._hearings.run_once(self._leadership.token)
        self._sweeper.run_once()
        self._reconcile()
        self._cancels.run_once(is_woken=self._intake.take_wished())
        self._inboxes.run_once()
        if self._complete:
            self._placer.run_once(self._leadership.token)
        self._dispatch()

    def _keep_lead(self) -> bool:
        """Whether it leads; notes since when it has been in touch with the server.

        A standby that was in touch all along need not wait before it takes back what the workers
        of a vanished host held, however often the lead changes.
        """
        leads = self._leadership.keep()
        now = time.monotonic()
        if now - self._heard_at > SILENCE_S:
            self._quiet_until = now + RESCUE_GRACE_S
        self._heard_at = now
        return leads

    def _read_leader(self) -> str:
        token = self._connection.get(self._keys.leader)
        return token.decode() if isinstance(token, bytes) else ""

    def _take_over(self) -> None:
        """Once for each term of leadership: publish the handshake, read what is pending."""
        token = self._leadership.token
        if self._prepared_for == token:
            return
        self._publish_handshake()
        self._recognize_server()
        self._intake.read_again()
        self._recall.begin()
        self._reconciler.begin()
        self._roster.mark_stale()
        self._prepared_for = token
        self._ready.set()

    def _load_scripts(self) -> None:
        """Clients may not load them; a new server process, or one told to forget, has none."""
        if loaded := load_scripts(self._connection):
            log.info("loaded %s into the server", counted(loaded, "script"))

    def _recognize_server(self) -> None:
        """A connection may have been made anew to another server, unnoticed by its user."""
        fenced = self._promotion.check(self._leadership.token)
        if fenced < 0:
            raise LostLeadership
        if fenced:
            self._roster.mark_stale()

    def _recall_models(self) -> None:
        """Models that an earlier leader knew stay known."""
        names, adapters = self._connection.hmget(self._keys.info, "models", "adapters")
        try:
            self._models.recall(
                msgspec.json.decode(names or b"[]", type=list[str]),
                msgspec.json.decode(adapters or b"{}", type=dict[str, str]),
            )
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._counts.found_bad("info")
            log.warning(
                "the models in the handshake cannot be read, and are written anew: %s", error
            )

    def _publish_handshake(self) -> None:
        self._recall_models()
        self._counts.know(self._models.bases)
        info: Mapping[str, Arg] = {
            "protocol": WIRE_VERSION,
            "coordinator": self._settings.name,
            "models": msgspec.json.encode(self._models.names),
            "adapters": msgspec.json.encode(self._models.adapters),
            "default_model": self._models.only,
            "max_num_queued_reqs": self._settings.max_num_queued_reqs,
            "max_num_queued_tokens": self._settings.max_num_queued_tokens,
            "max_request_bytes": self._settings.max_request_bytes,
            "max_normal_share": self._settings.max_normal_share,
            "max_low_share": self._settings.max_low_share,
            "waiting_clients": self._intake.backlog.clients,
            "rate": round(self._dispatcher.rate.per_s, 3),
            "guests": msgspec.json.encode(
                [mark_of(self._settings.yard, guest) for guest in self._settings.guests]
            ),
        }
        if not self._scripts.take_over(self._leadership.token, info):
            raise LostLeadership

    def _follow_roster(self) -> None:
        if not self._roster.refresh():
            return
        self._recognize_server()
        self._load_scripts()
        self._roster.forget_hosts()
        self._follow_lanes()
        if self._models.learn(self._roster.bases()):
            self._publish_handshake()
            self._intake.read_again()  # to judge it anew
        elif self._dispatcher.rate.measure(time.monotonic()):
            self._publish_handshake()
        self._intake.compare()
        self._start_when_complete()

    def _follow_lanes(self) -> None:
        """Forget the prefixes of workers that have left, and weigh lanes that nobody has yet."""
        if self._selection.is_affine:
            members = self._roster.members.items()
            caches = {w: Cache(m.info.cache_tokens, m.info.weights) for w, m in members if m.serves}
            self._selection.follow(caches)
        self._recall.run_once()

    def _start_when_complete(self) -> None:
        """Begin to dispatch once the expected workers are there."""
        joined = self._roster.joined()
        if self._complete or len(joined) < self._settings.expect_workers:
            return
        self._complete = True
        self._selection.start_when_complete(self._roster.worker_order())
        log.info("%s joined", counted(len(joined), "worker"))

    def _rescue(self) -> None:
        lost = self._roster.lost
        if time.monotonic() < self._quiet_until:
            members = self._roster.members
            lost = [w for w in lost if w not in members or members[w].lease_ms <= 0]
        if not lost:
            self._backlog = 0
            return
        self._backlog = self._rescuer.run_once(self._leadership.token, lost)
        if self._backlog == RESCUE_NOT_LEADER:
            raise LostLeadership
        if not self._backlog:
            self._roster.mark_stale()

    def _reconcile(self) -> None:
        if self._dispatcher.take_missed():
            self._reconciler.hurry()
        if not self._reconciler.run_once(self._leadership.token):
            raise LostLeadership

    def _slots_of(self, worker: str) -> int:
        """How many requests a worker's engine runs at once, as far as the roster tells."""
        member = self._roster.members.get(worker)
        return member.info.slots if member else sys.maxsize

    def _count_moved(self, worker: str, count: int) -> None:
        """Requests were taken back from a lost worker."""
        member = self._roster.members.get(worker)
        self._counts.took_back(member.lease_ms if member else 0, count)

    def _dispatch(self) -> None:
        self._dispatcher.run_once(
            self._leadership.token, may_place=self._complete, block_ms=self._patience_ms()
        )

    def _patience_ms(self) -> int:
        """How long this turn may wait for something to read."""
        services = (self._sweeper, self._cancels, self._reconciler)
        if self._backlog or any(service.has_more for service in services):
            return 0
        patience_s = min(self._placer.patience_s, self._hearings.patience_s)
        return math.ceil(min(self._block_ms, 1000 * patience_s))

    def _recover(self) -> None:
        """After a fault of the connection: what was read may have been lost on the way."""
        self._prepared_for = ""
        self._has_loaded = False
        self._heard_at = -math.inf

    def _close(self) -> None:
        with contextlib.suppress(redis.RedisError):
            self._leadership.resign()
        self._inboxes.stop()
        self._selection.close()
        if self._endpoint:
            self._endpoint.stop()
        self._tracer.stop()
        self._connection.close()
