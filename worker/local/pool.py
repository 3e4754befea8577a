"""A pool with its own thread, for a program without Redis.

Only that thread touches the pool. Other threads submit orders and wait with a timeout.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from tokenyard import clock
from tokenyard.protocol.errors import EngineLost, NoFreeDevice, TokenyardError, WaitTimeout
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.scripts.answers import Why
from worker.engines import Memory, Unsupported
from worker.host.allocation import Goal
from worker.host.diagnosis import FailedStart
from worker.host.membership import SHOWN
from worker.host.pool import Pool
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.local.booking import Booking
from worker.local.requests import RequestBatch
from worker.messages import Replies, ToController
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.local")

#: States of a process that is not warm yet.
_COLD = frozenset({"warming", "failed"})

Order = Callable[[], Future[None]]


class LocalPool:
    """Worker processes of the calling program, without Redis.

    One thread manages them; other threads hand it orders.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.bookings = Bookings(settings, self._show)
        self._pool = self.bookings.pool
        self._orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # held while an order is submitted and while the pool closes
        self._is_open = False
        self._stops = 0
        self._news = threading.Condition()
        self._statuses: Sequence[ProcessStatus] = ()
        self._thread = threading.Thread(target=self._run, name="tokenyard-pool", daemon=True)

    def start(self) -> None:
        """Prepare this host and start to warm up processes."""
        self._pool.start()
        self.bookings.tell()
        self._is_open = True
        self._thread.start()

    def stop(self, timeout_s: float, *, at_once: bool = False) -> None:
        """Let engines finish their requests for ``grace_s``, then end all worker processes.

        A second call, or ``at_once``, skips the wait. Raises `WaitTimeout` after ``timeout_s``: the
        pool goes on stopping.
        """
        with self._gate:
            self._stops += 2 if at_once else 1
            if self._is_open:  # a closed pool may have closed its wakeup pipe
                self._pool.wakeup.set()
            self._is_open = False
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(f"the pool has not stopped within {timeout_s:g} s; it is stopping")

    # Processes

    @property
    def statuses(self) -> list[ProcessStatus]:
        """The current status of each process."""
        with self._news:
            return list(self._statuses)

    def wait_warm(self, timeout_s: float) -> None:
        """Wait until every process is warm; raises `WaitTimeout`, also where the pool stops."""
        with self._news:
            self._news.wait_for(lambda: not self._cold() or not self._is_open, timeout_s)
            cold = self._cold()
        if cold:
            when = f"within {timeout_s:g} s" if self._is_open else "when the pool stopped"
            raise WaitTimeout(f"not warm {when}: {'; '.join(map(str, cold))}")

    def _cold(self) -> list[ProcessStatus]:
        return [status for status in self._statuses if status.state in _COLD]

    def _show(self, statuses: Sequence[ProcessStatus]) -> None:
        with self._news:
            self._statuses = statuses
            self._news.notify_all()

    # Engines

    def book(self, booking: Booking, timeout_s: float) -> None:
        """Start an engine; raises `NoFreeDevice`, `LoadFailed`, `WaitTimeout`."""
        try:
            self.carry_out(partial(self.bookings.book, booking), booking, "up", timeout_s)
        except BaseException:
            self._submit_if_open(partial(self.bookings.release, booking))
            raise

    def carry_out(self, order: Order, booking: Booking, goal: str, timeout_s: float) -> None:
        """Submit an order to `bookings` and wait until it is carried out.

        Raises what the order raises, and `WaitTimeout`.
        """
        until = clock.monotonic() + timeout_s
        begun: Future[Future[None]] = Future()

        def begin() -> None:
            try:
                begun.set_result(order())
            except (TokenyardError, Unsupported, RuntimeError) as error:
                begun.set_exception(error)

        self._submit(begin)
        try:
            begun.result(timeout_s).result(max(0.0, until - clock.monotonic()))
        except TimeoutError:
            why = f": {booking.fault}" if booking.fault else ""
            message = f"{booking.spec.name} is not {goal} within {timeout_s:g} s{why}"
            raise WaitTimeout(message) from None

    # Requests

    def ask(self, booking: Booking, call: RequestBatch) -> None:
        """Send requests to an engine; the replies go to ``call``."""
        self._submit(partial(booking.ask, call))

    def forget(self, booking: Booking, call: RequestBatch) -> None:
        """Cancel the unanswered requests."""
        entries = list(call.unanswered)
        if entries:
            self._submit_if_open(partial(booking.forget, entries))

    def _submit(self, order: Callable[[], object]) -> None:
        with self._gate:
            if not self._is_open:
                raise RuntimeError("the controller does not run; start it first")
            self._orders.put(order)
            self._pool.wakeup.set()

    def _submit_if_open(self, order: Callable[[], object]) -> None:
        """Submit an order; do nothing if the pool has stopped."""
        with contextlib.suppress(RuntimeError):
            self._submit(order)

    # The pool's thread

    def _run(self) -> None:
        try:
            while not self._stops:
                self._obey()
                self._pool.run_once()
            self._pool.drain(lambda: self._stops > 1)
        finally:
            with self._gate:
                self._is_open = False
            self._obey()
            self.bookings.end()

    def _obey(self) -> None:
        while not self._orders.empty():
            self._orders.get()()


# The engines of a program's own pool, with their devices and states.
#
# It listens to the pool. Only the pool's thread calls it.


class Bookings:
    """Assigns devices to engines; calls ``show`` whenever a process changes."""

    def __init__(
        self, settings: WorkerSettings, show: Callable[[Sequence[ProcessStatus]], None]
    ) -> None:
        self.pool = Pool(settings, self)
        self._all: list[Booking] = []
        self._deaths: dict[str, str] = {}  # reason of the last death, by process
        self._show = show

    # Orders of the program

    def book(self, booking: Booking) -> Future[None]:
        """Start an engine on free devices; raises `NoFreeDevice`."""
        ranks = booking.spec.ranks
        free = self._free(booking.spec, ranks, self.pool.goals)
        chosen = sorted(sorted(free, key=self._burden)[:ranks])
        self._all.append(booking)
        return self._aim(booking, chosen)

    def release(self, booking: Booking) -> Future[None]:
        """Finish an engine's requests and unload it."""
        booking.is_closed = True
        if self._has_devices(booking):
            self.pool.aim(None, booking.devices)
        for member in self._holders(booking):
            if member.state is State.ASLEEP:
                self.pool.give_way(member)
        self._settle()
        return booking.gone

    def put_to_sleep(self, booking: Booking, level: int) -> Future[None]:
        """Put an engine to sleep; raises `Unsupported` on several devices, `EngineLost`."""
        if booking.is_closed or booking.is_asleep:
            return booking.asleep
        if len(booking.devices) > 1:
            raise Unsupported("an engine on several devices cannot sleep; delete it instead")
        if booking.leader is None or not booking.is_serving:
            raise EngineLost(f"{booking.spec.name}: it is being loaded again; try later")
        booking.is_asleep, booking.asleep = True, Future()
        self.pool.put_to_sleep(booking.leader, level)
        return booking.asleep

    def wake(self, booking: Booking) -> Future[None]:
        """Wake an engine on its devices; raises `NoFreeDevice`."""
        if booking.is_closed:
            raise RuntimeError(f"the engine {booking.spec.name} was deleted")
        if not booking.is_asleep:
            return booking.up
        self._free(booking.spec, len(booking.devices), booking.devices)
        return self._aim(booking, booking.devices)

    def resize(self, booking: Booking, spec: ModelSpec) -> Future[None]:
        """Give an engine one device per rank of ``spec``; raises `NoFreeDevice`, `EngineLost`."""
        if booking.is_closed or booking.is_asleep:
            state = "was deleted" if booking.is_closed else "sleeps; wake it first"
            raise RuntimeError(f"the engine {spec.name} {state}")
        if not booking.is_serving:
            raise EngineLost(f"{spec.name}: it is being loaded again; try later")
        more = spec.ranks - len(booking.devices)
        free = self._free(spec, more, self.pool.goals, " more")
        added = sorted(free, key=self._burden)[: max(0, more)]
        before, devices = booking.devices, (*booking.devices[: spec.ranks], *sorted(added))
        booking.resize(spec, devices)
        self.pool.aim(None, before)
        self.pool.aim(spec, devices)
        return booking.resized

    def _revert(self, booking: Booking, goal: Goal, reason: str) -> bool:
        """Return an engine to its old size; returns whether its devices are still free."""
        booking.revert(reason)
        self.pool.aim(None, goal.devices)
        if any(self.pool.goals[device] for device in booking.devices):
            booking.give_up_requests(f"it could not be resized ({reason}), and its device is taken")
            booking.is_asleep = True  # it holds no device
            return False
        self.pool.aim(booking.spec, booking.devices)
        return True

    def tell(self) -> None:
        """Show the current status of each process."""
        members = self.pool.members
        self._show([process_status(one, self._deaths.get(one.name, "")) for one in members])

    def end(self) -> None:
        """End all engines and stop the pool."""
        for booking in self._all:
            booking.end("the controller has stopped")
        self.pool.stop()
        self.tell()

    def _aim(self, booking: Booking, devices: Sequence[int]) -> Future[None]:
        booking.book(devices)
        self.pool.aim(booking.spec, devices)
        return booking.up

    def _burden(self, device: int) -> tuple[bool, bool]:
        """Sort key: devices that hold no model and have a warm process come first."""
        members = [member for member in self.pool.members if member.device == device]
        is_warm = any(member.state is State.WARM for member in members)
        return self.pool.holder(device) is not None, not is_warm

    def _free(
        self, spec: ModelSpec, count: int, devices: Iterable[int], more: str = ""
    ) -> list[int]:
        """The free ones of ``devices``; raises `NoFreeDevice` if they are fewer than ``count``."""
        free = [device for device in devices if self.pool.goals[device] is None]
        if len(free) >= count:
            return free
        goals = self.pool.goals.items()
        held = ", ".join(
            f"device {device} holds {goal.spec.name}" for device, goal in goals if goal
        )
        raise NoFreeDevice(
            f"{spec.name} takes {count}{more}, {len(free)} free: {held}; delete one first"
        )

    def _has_devices(self, booking: Booking) -> bool:
        goals = [self.pool.goals[device] for device in booking.devices]
        return any(goal is not None and goal.spec is booking.spec for goal in goals)

    def _holders(self, booking: Booking) -> list[WorkerProcessHandle]:
        specs = [booking.spec, *([booking.before.spec] if booking.before else [])]
        return [one for one in self.pool.members if any(one.spec is spec for spec in specs)]

    def _of(self, spec: ModelSpec | None) -> Booking | None:
        return next((one for one in self._all if one.spec is spec or _was(one, spec)), None)

    # PoolListener

    def changed(self, member: WorkerProcessHandle) -> None:
        """See `PoolListener`."""
        if member.state is State.WARM:
            self._deaths.pop(member.name, None)
        if member.is_in_crash_loop:
            self._fail_crash_looping(member.device)
        self.tell()  # before a waiting thread looks
        booking = self._of(member.spec)
        if booking and member.state is State.ASLEEP and _was(booking, member.spec):
            self.pool.give_way(member)  # the engine will not wake in its old size
        self._settle()

    def serves(self, member: WorkerProcessHandle) -> None:
        """See `PoolListener`; the engine receives the waiting requests."""
        self.tell()
        booking = self._of(member.spec)
        if booking and not booking.is_closed and booking.spec is member.spec:
            booking.serve(member)

    def gives_way(self, member: WorkerProcessHandle) -> None:
        """See `PoolListener`; unfinished requests fail."""
        booking = self._of(member.spec)
        if booking and _was(booking, member.spec):
            booking.cut_off("it had to go before it was done")
        elif booking:
            booking.give_up_requests("it had to go before it was done")

    def died(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        """See `PoolListener`."""
        if why != "left":
            self._deaths[member.name] = reason
        booking = self._of(member.spec)
        if booking and _was(booking, member.spec):
            booking.cut_off(f"its process died ({member.name}: {reason})")
        elif booking:
            booking.lose(f"{member.name}: {reason}")

    def start_failed(self, member: WorkerProcessHandle, death: FailedStart) -> None:
        """Do nothing: `_fail_crash_looping` reports repeated failures."""

    def failed(self, goal: Goal, reason: str, *, is_lost: bool = False) -> bool:
        """See `PoolListener`."""
        booking = self._of(goal.spec)
        if booking is None:
            return False
        if is_lost:
            return not booking.is_closed
        if booking.before and not booking.is_closed:
            return self._revert(booking, goal, reason)
        return booking.miss(reason)

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """Do nothing: an engine that cannot sleep is unloaded, and `wake` loads it."""

    def heard(self, member: WorkerProcessHandle, message: ToController) -> None:
        """See `PoolListener`; passes replies to their engine."""
        booking = self._of(member.spec)
        if booking and isinstance(message, Replies):
            booking.take(message.replies)

    def _fail_crash_looping(self, device: int) -> None:
        """Fail the first load on a device whose processes are all in a crash loop."""
        members = [member for member in self.pool.members if member.device == device]
        goal = self.pool.goals[device]
        if goal is None or not all(member.is_in_crash_loop for member in members):
            return
        deaths = [f"{one.name}: {self._deaths.get(one.name, '')}" for one in members]
        if not self.failed(goal, f"processes die again and again: {'; '.join(deaths)}"):
            self.pool.aim(None, goal.devices)

    def _settle(self) -> None:
        """Complete the futures of finished sleeps and deletions."""
        for booking in self._all:
            if booking.is_asleep and not booking.asleep.done() and not self._is_awake(booking):
                booking.asleep.set_result(None)
            if booking.is_closed and not self._holders(booking):
                booking.end("it was deleted")
        self._all = [booking for booking in self._all if not booking.gone.done()]

    def _is_awake(self, booking: Booking) -> bool:
        return any(member.is_awake for member in self._holders(booking))


def _was(booking: Booking, spec: ModelSpec | None) -> bool:
    """Whether ``spec`` is the engine's old size, during a resize."""
    return booking.before is not None and booking.before.spec is spec


# The status of a pool's processes, for its program.

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process of a pool at its last change of state."""

    name: str
    device: int
    state: str  # warming, warm, loading, ready, draining, asleep, unloading, attached, failed
    model: str  # that it holds or loads; "" for none
    pid: int  # 0 if no process runs
    phases_s: Mapping[str, float]  # seconds by phase of its last warm-up, load, sleep or wake
    memory: Memory | None  # bytes, measured after that change
    baseline: Memory | None  # bytes when it was first warm
    fault: str  # how the previous process died, until this one is warm

    def __str__(self) -> str:
        memory = f"{self.memory.scarce / _MIB:.0f} MiB" if self.memory else ""
        phases = ", ".join(f"{phase} {took:.2f} s" for phase, took in self.phases_s.items())
        start = f"{self.name:<10} device {self.device}  {self.state:<9}"
        parts = [start, self.model, memory, phases, self.fault]
        return "  ".join(part for part in parts if part).rstrip()


def process_status(member: WorkerProcessHandle, fault: str) -> ProcessStatus:
    """Make the status of a process; ``fault`` is how its predecessor died."""
    is_new = member.state is State.DOWN and not fault  # about to start
    return ProcessStatus(
        name=member.name,
        device=member.device,
        state="warming" if is_new else SHOWN.get(member.state, "failed"),
        model=member.model,
        pid=member.pid,
        phases_s=dict(member.phases_s),
        memory=member.memory.now,
        baseline=member.memory.baseline,
        fault=fault,
    )
