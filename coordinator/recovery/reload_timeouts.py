"""Ends reloads that were not ended in time, since their command may have died in between."""

from __future__ import annotations

import logging

from coordinator.roster import Roster
from tokenyard.protocol.control import encode_desired, undo_reload
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.reload_timeouts")


class ReloadTimeouts:
    """Restores the old weights where a reload was not confirmed in time."""

    def __init__(self, scripts: Scripts, roster: Roster) -> None:
        self._scripts = scripts
        self._roster = roster
        self._seen: object = None  # the desired states that were checked last

    def run_once(self) -> None:
        """Undo overdue reloads, once for each reading of the roster."""
        desired_states = self._roster.desired_states
        if desired_states is self._seen:
            return
        self._seen = desired_states
        for scope, desired_state in desired_states.by_scope.items():
            trial = desired_state.trial
            if trial and self._roster.broker_time.now_ms >= trial.until_ms:
                why = "the reload was not ended in time"
                order, before = undo_reload(scope, desired_state, why)
                if self._scripts.signal(order, encode_desired(desired_state), before):
                    weights = before.weights or "its own weights"
                    log.warning("%s: %s; it goes back to %s", scope, why, weights)
