"""The policy in force: the pure function, the turn it is at, and the schedule it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from coordinator.policies import Lane, named, round_robin
from coordinator.schedule import Replay, ScheduleWriter, read_schedule
from coordinator.waiting import Waiting
from tokenyard.keys import IntakeClass
from tokenyard.settings import CoordinatorSettings


class Selection:
    """Chooses lanes as the settings say, and records the choices that were carried out."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._replay: Replay | None = None
        self._writer = ScheduleWriter(settings.record) if settings.record else None
        self._last: dict[str, str] = {}  # by model: the worker that was given the last request
        # Deterministic: the workers of each model, how many requests of each class and model had
        # their turn, and whose turn each waiting one is.
        self._crews: dict[str, list[str]] = {}
        self._turns: Counter[tuple[IntakeClass, str]] = Counter()
        self._due: dict[tuple[IntakeClass, str], str] = {}

    @property
    def record(self) -> ScheduleWriter | None:
        """Where decisions are recorded, if anywhere."""
        return self._writer

    def start(self) -> None:
        """Read the schedule to follow, if there is one."""
        if self._settings.replay:
            self._replay = Replay(read_schedule(self._settings.replay))

    def muster(self, lanes: Sequence[Lane]) -> None:
        """The expected workers have joined: the deterministic mode deals to these, by name."""
        for lane in lanes:
            self._crews.setdefault(lane.model, []).append(lane.name)

    def choose(self, waiting: Waiting, lanes: Sequence[Lane]) -> Lane | None:
        """A lane for the request among those of its model, or None while it has to wait."""
        recorded = self._replay and self._replay.worker(waiting.client, waiting.id)
        if recorded:
            return named(lanes, recorded)
        if self._settings.deterministic:
            return self._in_turn(waiting, lanes)
        lane = round_robin(lanes, self._last.get(lanes[0].model, ""))
        if lane:
            self._last[lane.model] = lane.name
        return lane

    def _in_turn(self, waiting: Waiting, lanes: Sequence[Lane]) -> Lane | None:
        """Entry k of a class belongs to worker k modulo the workers.

        However full that one is, and also while it is away: when a place becomes free, and in
        which order the classes are served, is a matter of time.
        """
        key = (waiting.intake, waiting.entry)
        if key not in self._due:
            model = lanes[0].model
            crew = self._crews.setdefault(model, [lane.name for lane in lanes])
            self._due[key] = crew[self._turns[waiting.intake, model] % len(crew)]
            self._turns[waiting.intake, model] += 1
        return named(lanes, self._due[key])

    def settle(self, waiting: Waiting, lane: Lane | None) -> None:
        """The request was handed over to ``lane``, or turned out to wait no more."""
        self._due.pop((waiting.intake, waiting.entry), None)
        if lane is None:
            return
        if self._replay:
            self._replay.advance(waiting.client, waiting.id)
        if self._writer:
            self._writer.write(waiting.client, waiting.id, lane.name)

    def why(self, lane: Lane, *, alone: bool) -> str:
        """Why that lane, in words, for `tokenyard explain`."""
        if alone:
            return "a suspect, alone on an empty lane"
        policy: str = "replay" if self._replay else self._settings.policy
        if self._settings.deterministic:
            policy = "deterministic"
        return f"{policy}, load {lane.load} of {lane.limit}"

    def close(self) -> None:
        """Close the record; idempotent."""
        if self._writer:
            self._writer.close()
