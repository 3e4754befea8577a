"""An engine of a program: its devices and its unanswered requests.

Only the pool's thread changes it; other threads wait for its futures and read ``info``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Final

from tokenyard.protocol.errors import EngineLost, LoadFailed
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment
from worker.engines import EngineInfo
from worker.host.allocation import Goal
from worker.host.process_handle import WorkerProcessHandle
from worker.local.requests import RequestBatch
from worker.messages import LOCAL, AbortRequests, Delivery, Serve
from worker.models import ModelSpec

#: Requests per message: the engine starts on the first while others are in transit.
_AT_ONCE: Final = 500


class Booking:
    """A model on devices of the pool; its spec is unique and compared by identity."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.devices: tuple[int, ...] = ()
        self.before: Goal | None = None  # in its old size, during a resize
        self.info: EngineInfo | None = None  # reported by its last load
        self.fault = ""  # reason why it is not up
        self.leader: WorkerProcessHandle | None = None  # the process that serves or served it
        self.is_serving = False
        self.is_asleep = False  # or falling asleep
        self.is_closed = False
        self.up: Future[None] = Future()
        self.asleep: Future[None] = Future()
        self.gone: Future[None] = Future()
        self.resized: Future[None] = Future()
        self._finishing: set[str] = set()  # entries in the engine before a resize
        self._asked: dict[str, RequestBatch] = {}  # unanswered, by entry

    def book(self, devices: Sequence[int]) -> None:
        """Assign the devices on which it will be loaded."""
        self.devices = tuple(devices)
        self.is_asleep = False
        if self.up.done():
            self.up = Future()

    def serve(self, leader: WorkerProcessHandle) -> None:
        """Send the waiting requests to the engine, which is up."""
        self.leader, self.info, self.fault, self.is_serving = leader, leader.engine, "", True
        leader.send(Serve(LOCAL))
        _give(leader, [call.assignments[entry] for entry, call in self._asked.items()])
        if not self.up.done():
            self.up.set_result(None)
        if self.before:
            self.before = None
            self.resized.set_result(None)

    def resize(self, spec: ModelSpec, devices: Sequence[int]) -> None:
        """Start a resize; new requests wait for its end."""
        self.before, self.resized = Goal(self.spec, self.devices), Future()
        self._finishing, self.is_serving = set(self._asked), False
        self.spec = spec
        self.book(devices)

    def revert(self, reason: str) -> None:
        """Return to the old size because the load in the new size failed."""
        if self.before is None:
            raise RuntimeError("it is not being resized")
        before, self.before = self.before, None
        self.spec, self.fault = before.spec, reason
        self.book(before.devices)
        self.resized.set_exception(LoadFailed(reason))

    def cut_off(self, reason: str) -> None:
        """Fail the unfinished requests of the engine of the old size."""
        self._fail(self._finishing, reason)
        self._finishing.clear()

    def ask(self, call: RequestBatch) -> None:
        """Accept requests; they wait while the engine loads."""
        if self.is_closed or self.is_asleep:
            state = "was deleted" if self.is_closed else "sleeps; wake it first"
            call.fail(RuntimeError(f"the engine {self.spec.name} {state}"))
            return
        self._asked.update(dict.fromkeys(call.assignments, call))
        if self.is_serving and self.leader:
            _give(self.leader, list(call.assignments.values()))

    def forget(self, entries: Iterable[str]) -> None:
        """Cancel requests."""
        known = [entry for entry in entries if self._asked.pop(entry, None)]
        if known and self.leader and (self.is_serving or self._finishing):
            self.leader.send(AbortRequests(LOCAL, known))

    def take(self, replies: Iterable[tuple[str, Reply]]) -> None:
        """Pass replies to their requests."""
        for entry, reply in replies:
            call = self._asked.get(entry)
            if call is None:
                continue
            if reply.event == "result":
                del self._asked[entry]
            call.take(entry, reply)

    def give_up_requests(self, reason: str) -> None:
        """Fail all unanswered requests."""
        self.is_serving = False
        self._fail(list(self._asked), reason)

    def _fail(self, entries: Iterable[str], reason: str) -> None:
        """Fail the batches of these requests."""
        for entry in entries:
            if call := self._asked.get(entry):
                for one in call.assignments:
                    self._asked.pop(one, None)
                call.fail(EngineLost(f"{self.spec.name}: {reason}"))

    def lose(self, reason: str) -> None:
        """Fail the requests that its dead process had; the others wait for the next process."""
        self.fault = reason
        if self.is_serving:
            then = "" if self.is_closed or self.is_asleep else "; it is being loaded again"
            self.give_up_requests(f"its process died ({reason}){then}")

    def miss(self, reason: str) -> bool:
        """Record a failed load; returns whether to retry: only if the engine was up before."""
        self.fault = reason
        if self.is_closed:
            return False
        if self.up.done():
            return True
        self.is_asleep = True  # it holds no device
        self.up.set_exception(LoadFailed(reason))
        return False

    def end(self, reason: str) -> None:
        """End the engine for good."""
        self.is_closed = True
        self.give_up_requests(reason)
        if not self.up.done():
            self.up.set_exception(EngineLost(f"{self.spec.name}: {reason}"))
        if self.before and not self.resized.done():
            self.resized.set_exception(EngineLost(f"{self.spec.name}: {reason}"))
        for future in (self.asleep, self.gone):
            if not future.done():
                future.set_result(None)


def _give(leader: WorkerProcessHandle, assignments: Sequence[Assignment]) -> None:
    for at in range(0, len(assignments), _AT_ONCE):
        leader.send(Delivery(LOCAL, assignments[at : at + _AT_ONCE]))
