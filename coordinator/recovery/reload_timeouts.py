"""Ends reloads that were not ended in time, since their command may have died in between."""

from __future__ import annotations

import logging

from coordinator.roster import Roster
from tokenyard import clock
from tokenyard.protocol.control import encode_desired, undo_reload
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.reload_timeouts")


class ReloadTimeouts:
    """Restores the old weights where a reload was not confirmed in time."""

    def __init__(self, scripts: Scripts, roster: Roster) -> None:
        self._scripts = scripts
        self._roster = roster
        self._seen: object = None  # the desired states that were checked last
        self._ends_at: dict[tuple[str, int], float] = {}  # of trials, by `monotonic`

    def run_once(self) -> None:
        """Undo overdue reloads, once for each reading of the roster."""
        desired_states = self._roster.desired_states
        if desired_states is self._seen:
            return
        self._seen = desired_states
        before, self._ends_at = self._ends_at, {}
        for scope, desired_state in desired_states.by_scope.items():
            trial = desired_state.trial
            if not trial:
                continue
            # A step of the broker's clock ends no trial that was seen before.
            key = (scope, trial.until_ms)
            ends_at = before.get(key) or self._roster.broker_time.to_monotonic(trial.until_ms)
            self._ends_at[key] = ends_at
            if clock.monotonic() >= ends_at:
                why = "the reload was not ended in time"
                order, earlier = undo_reload(scope, desired_state, why)
                if self._scripts.signal(order, encode_desired(desired_state), earlier):
                    weights = earlier.weights or "its own weights"
                    log.warning("%s: %s; it goes back to %s", scope, why, weights)
