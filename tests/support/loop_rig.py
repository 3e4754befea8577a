"""An engine loop with a stub engine and stub lane sessions."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.builders import make_assignment
from tokenyard.clock import BrokerTime
from tokenyard.protocol.replies import Choice
from tokenyard.protocol.wire import Assignment
from worker.engines import Engine, EngineEvent, EngineInfo, Finished, Memory, TokenDelta
from worker.messages import Delivery, Serve, ToController, ToProcess
from worker.process.loop import EngineLoop
from worker.process.outcomes import Aborted, Outcome, Run
from worker.process.recent_results import RecentResults

INFO = EngineInfo(
    "simulated",
    "1",
    "sim",
    "",
    max_model_len=100,
    vocab_size=100,
    max_num_seqs=4,
    adapters=("lora",),
)


MEMORY = Memory(host=1000)


def finished(key: str, tokens: list[int]) -> Finished:
    return Finished(key, [Choice(0, tokens, None, "length")], prompt_tokens=3)


@dataclass
class StubEngine:
    """An engine whose steps return what the test sets."""

    info: EngineInfo = INFO
    has: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    steps: list[list[EngineEvent]] = field(default_factory=list)
    made: list[int] | None = field(default_factory=list)  # None: it cannot tell
    changes: list[tuple[Any, ...]] = field(default_factory=list)  # with the requests at that time

    def freeze(self, is_frozen: bool) -> None: ...

    def add(self, assignment: Assignment) -> None:
        self.has.append(assignment.entry)

    def abort(self, keys: Iterable[str]) -> None:
        gone = list(keys)
        self.aborted += gone
        self.has = [key for key in self.has if key not in gone]

    def take_out(self, key: str) -> Finished | None:
        if key not in self.has:
            return None
        self.has.remove(key)
        if self.made is None:
            return Finished(key, [], prompt_tokens=3)
        return finished(key, self.made)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.has)

    def progress(self) -> dict[str, int]:
        return {key: len(self.made or ()) for key in self.has}

    def step(self) -> list[EngineEvent]:
        events = self.steps.pop(0) if self.steps else []
        ended = {event.key for event in events if not isinstance(event, TokenDelta)}
        self.has = [key for key in self.has if key not in ended]
        return events

    def close(self) -> None: ...

    def sleep(self, level: int) -> None:
        self.changes.append(("sleep", level, list(self.has)))

    def wake(self) -> None:
        self.changes.append(("wake", list(self.has)))

    def reload(self, path: str) -> None:
        self.changes.append(("reload", path, list(self.has)))


class StubSession:
    """Records publications."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.broker_time = BrokerTime()
        self.attempts = 0
        self.runs: dict[str, Run] = {}
        self.given: list[Outcome] = []
        self.epochs: list[int | None] = []  # of each step
        self.settled: list[Aborted] = []
        self.made: list[Mapping[str, int]] = []
        self.running = False

    def start(self) -> None:
        self.running = True

    def put(self, events: Sequence[Outcome], epoch: int | None = None) -> None:
        self.given += events
        self.epochs.append(epoch)
        for event in events:
            if not isinstance(event, TokenDelta):
                self.runs.pop(event.key, None)

    def settle(self, aborted: Aborted) -> None:
        self.settled.append(aborted)

    def note_made(self, made: Mapping[str, int]) -> None:
        self.made.append(made)

    def end(self) -> None:
        self.running = False


class RecordingQueue(queue.SimpleQueue):
    """A queue that records the timeout of each get."""

    waits: list[float | None]

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        self.waits.append(timeout if block else 0.0)
        return super().get(block, timeout)


class LoopRig:
    """An engine loop, its stub sessions, and its messages to the controller."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine: Any = engine or StubEngine()
        self.sessions: list[StubSession] = []
        self.told: list[ToController] = []
        self.inbox = RecordingQueue()
        self.inbox.waits = []
        self.results = RecentResults()
        self.loop = EngineLoop(
            self.engine,
            self.inbox,
            self._open_session,
            lambda: MEMORY,
            self.told.append,
            self.results,
        )
        self.say(Serve("w.1"))

    def _open_session(self, worker: str) -> StubSession:
        self.sessions.append(StubSession(worker))
        return self.sessions[-1]

    def turn(self) -> None:
        self.loop.run_once()

    def say(self, *messages: ToProcess) -> None:
        """Put messages into the inbox, and let the loop turn."""
        for message in messages:
            self.loop.inbox.put(message)
        self.turn()

    def deliver(self, entry: str, worker: str = "w.1", **values: Any) -> Assignment:
        assignment = make_assignment(entry=entry, **values)
        self.loop.inbox.put(Delivery(worker, [assignment]))
        return assignment

    def bring(self, entry: str, worker: str = "w.1", **values: Any) -> Assignment:
        """Deliver a request, and let the loop turn."""
        assignment = self.deliver(entry, worker, **values)
        self.turn()
        return assignment
