"""A pool with its own thread, for a program without Redis.

Only that thread touches the pool. Other threads submit orders and wait with a timeout.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from tokenyard import clock
from tokenyard.protocol.errors import TokenyardError, WaitTimeout
from tokenyard.protocol.settings import WorkerSettings
from worker.engines import Unsupported
from worker.local.booking import Booking
from worker.local.bookings import Bookings
from worker.local.request_batch import RequestBatch
from worker.local.status import ProcessStatus

#: States of a process that is not warm yet.
_COLD = frozenset({"warming", "failed"})

Order = Callable[[], Future[None]]


class LocalPool:
    """Runs a program's orders in the pool's thread."""

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
        """Drain for ``grace_s``, then stop; a second call, or ``at_once``, stops immediately.

        Raises `WaitTimeout` if the pool's thread still runs after ``timeout_s``.
        """
        with self._gate:
            self._stops += 2 if at_once else 1
            if self._is_open:  # after that its wakeup pipe may be closed
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
        """Wait until every process is warm; raises `WaitTimeout`."""
        with self._news:
            self._news.wait_for(lambda: not self._cold() or not self._is_open, timeout_s)
            cold = self._cold()
        if cold:
            raise WaitTimeout(f"not warm within {timeout_s:g} s: {'; '.join(map(str, cold))}")

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
            self._mention(partial(self.bookings.release, booking))
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

        self._give(begin)
        try:
            begun.result(timeout_s).result(max(0.0, until - clock.monotonic()))
        except TimeoutError:
            why = f": {booking.fault}" if booking.fault else ""
            message = f"{booking.spec.name} is not {goal} within {timeout_s:g} s{why}"
            raise WaitTimeout(message) from None

    # Requests

    def ask(self, booking: Booking, call: RequestBatch) -> None:
        """Send requests to an engine; the replies go to ``call``."""
        self._give(partial(booking.ask, call))

    def forget(self, booking: Booking, call: RequestBatch) -> None:
        """Cancel the unanswered requests."""
        entries = list(call.unanswered)
        if entries:
            self._mention(partial(booking.forget, entries))

    def _give(self, order: Callable[[], object]) -> None:
        with self._gate:
            if not self._is_open:
                raise RuntimeError("the controller does not run; start it first")
            self._orders.put(order)
            self._pool.wakeup.set()

    def _mention(self, order: Callable[[], object]) -> None:
        """Submit an order; do nothing if the pool has stopped."""
        with contextlib.suppress(RuntimeError):
            self._give(order)

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
