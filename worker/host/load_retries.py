"""When a model that could not be loaded is tried again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from redis.backoff import ExponentialWithJitterBackoff

from tokenyard import clock
from worker.host.allocation import Goal


class LoadRetries:
    """Pauses by device, which grow with each failed load of a goal in a row."""

    def __init__(self, base_s: float, cap_s: float) -> None:
        self._retry_at: dict[int, float] = {}  # by device, monotonic
        self._failures: Counter[Goal] = Counter()  # in a row
        self._backoff = ExponentialWithJitterBackoff(cap=cap_s, base=base_s)

    def failed(self, goal: Goal) -> None:
        """Pause the devices of a goal whose load failed."""
        self._failures[goal] += 1
        pause_s = self._backoff.compute(self._failures[goal])
        self._retry_at.update(dict.fromkeys(goal.devices, clock.monotonic() + pause_s))

    def succeeded(self) -> None:
        """A model was loaded: pauses no longer grow."""
        self._failures.clear()

    def forget(self, device: int) -> None:
        """A device has a new goal."""
        self._retry_at.pop(device, None)

    def retry_now(self, models: Collection[str], goals: Mapping[int, Goal | None]) -> None:
        """End the pauses of these models."""
        for device in list(self._retry_at):
            goal = goals[device]
            if goal and goal.spec.name in models:
                del self._retry_at[device]
                del self._failures[goal]

    def is_paused(self, goal: Goal) -> bool:
        """Whether a device of this goal pauses."""
        return bool(self._retry_at.keys() & goal.devices)

    def end_pauses(self) -> None:
        """Forget the pauses that are over."""
        now = clock.monotonic()
        self._retry_at = {device: at for device, at in self._retry_at.items() if at > now}

    def due(self) -> Collection[float]:
        """When the pauses end, monotonic."""
        return self._retry_at.values()
