"""The policy in force: the pure function, the turn it is at, and the schedule it writes."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.policies import Lane, named, round_robin
from coordinator.schedule import Replay, ScheduleWriter, read_schedule
from tokenyard.settings import CoordinatorSettings
from tokenyard.wire import Request


class Selection:
    """Chooses lanes as the settings say, and records the choices that were carried out."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._replay: Replay | None = None
        self._writer = ScheduleWriter(settings.record) if settings.record else None
        self._last: dict[str, str] = {}  # by model: the worker that was given the last request
        self._turn = 0
        self._due: dict[tuple[str, str], str] = {}  # deterministic: whose turn each request is

    @property
    def strict_order(self) -> bool:
        """Whether a request that has to wait holds back those behind it."""
        return self._settings.deterministic or self._settings.replay is not None

    def start(self) -> None:
        """Read the schedule to follow, if there is one."""
        if self._settings.replay:
            self._replay = Replay(read_schedule(self._settings.replay))

    def choose(self, request: Request, lanes: Sequence[Lane]) -> Lane | None:
        """A lane for the request among those of its model, or None while it has to wait."""
        if self._replay is not None:
            return named(lanes, self._replay.worker(request.client, request.id))
        if self._settings.deterministic:
            return self._in_turn(request, lanes)
        lane = round_robin(lanes, self._last.get(lanes[0].model, ""))
        if lane:
            self._last[lane.model] = lane.name
        return lane

    def _in_turn(self, request: Request, lanes: Sequence[Lane]) -> Lane | None:
        """Request k of the yard belongs to worker k modulo the workers, however full it is."""
        key = (request.client, request.id)
        if key not in self._due:
            self._due[key] = lanes[self._turn % len(lanes)].name
            self._turn += 1
        return named(lanes, self._due[key])

    def settle(self, request: Request, lane: Lane | None) -> None:
        """The request was handed over to ``lane``, or turned out to wait no more."""
        self._due.pop((request.client, request.id), None)
        if lane is None:
            return
        if self._replay:
            self._replay.advance(request.client, request.id)
        if self._writer:
            self._writer.write(request.client, request.id, lane.name)

    def close(self) -> None:
        """Close the record; idempotent."""
        if self._writer:
            self._writer.close()
