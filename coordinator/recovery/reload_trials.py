"""Ends reloads that nobody ends: whoever gave new weights may have died in the middle."""

from __future__ import annotations

import logging

from coordinator.roster import Roster
from tokenyard.protocol.control import encode_posture, undo_reload
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.trials")


class Trials:
    """Brings the old weights back where the time of a reload is over."""

    def __init__(self, scripts: Scripts, roster: Roster) -> None:
        self._scripts = scripts
        self._roster = roster
        self._seen: object = None  # the postures that were looked at last

    def run_once(self) -> None:
        """End what is overdue, once for each reading of the roster."""
        postures = self._roster.postures
        if postures is self._seen:
            return
        self._seen = postures
        for scope, posture in postures.by_scope.items():
            trial = posture.trial
            if trial and self._roster.server_ms() >= trial.until_ms:
                why = "nobody has ended the reload"
                order, before = undo_reload(scope, posture, why)
                if self._scripts.signal(order, encode_posture(posture), before):
                    weights = before.weights or "its own weights"
                    log.warning("%s: %s; it goes back to %s", scope, why, weights)
