"""Ends trials: of suspects that survived or are gone, and of new weights not confirmed in time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.roster import Roster
from coordinator.routing.suspicion import QuarantineMark, TrialMember, has_survived
from tokenyard import clock
from tokenyard.protocol.control import encode_desired, undo_reload
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.streams import position, whole
from tokenyard.protocol.texts import counted
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.trial_monitor")

#: Groups on trial are checked so often.
CHECK_EVERY_S: Final = 0.05
BYTES_PER_PACKED_TOKEN: Final = 4


@dataclass(slots=True)
class GroupTrial:
    """A group on trial."""

    mark: QuarantineMark
    members: Sequence[tuple[str, str]]  # client and id
    unproven: list[TrialMember]  # those that are not past the crash yet


class TrialMonitor:
    """Notices when a group on trial has survived, and opens its lane for the next."""

    def __init__(
        self,
        scripts: Scripts,
        roster: Roster,
        settings: CoordinatorSettings,
        *,
        has_suspects: Callable[[str], bool],
    ) -> None:
        """``has_suspects`` returns whether more suspects wait for a model."""
        self._yard = scripts.yard
        self._scripts = scripts
        self._roster = roster
        self._settings = settings
        self._has_suspects = has_suspects
        self._trials: dict[str, GroupTrial] = {}  # by worker
        self._due = 0.0

    @property
    def patience_s(self) -> float:
        """How long until the next check; infinite without a trial."""
        return max(0.0, self._due - clock.monotonic()) if self._trials else float("inf")

    def run_once(self, token: str) -> None:
        """Check each lane on which a group is on trial, and those kept for more suspects."""
        marked = {w: m.mark for w, m in self._roster.members.items() if m.mark.text and m.has_lease}
        if not marked and not self._trials:
            return  # nearly always
        for worker in self._trials.keys() - marked.keys():
            del self._trials[worker]
        if clock.monotonic() < self._due:
            return
        self._due = clock.monotonic() + CHECK_EVERY_S
        for worker, mark in marked.items():
            if mark.is_group:
                self._check(token, worker, mark)
            elif mark.is_kept and not self._is_needed(worker):
                self._acquit(token, worker, ())

    def _is_needed(self, worker: str) -> bool:
        return self._has_suspects(self._roster.members[worker].info.model)

    def _check(self, token: str, worker: str, mark: QuarantineMark) -> None:
        trial = self._trials.get(worker)
        if trial is None or trial.mark != mark:
            group = self._read_group(worker, mark)
            members = [(one.client, one.id) for one in group]
            self._trials[worker] = trial = GroupTrial(mark, members, group)
        trial.unproven = self._unproven(worker, trial.unproven)
        if not trial.unproven:
            self._acquit(token, worker, trial.members)

    def _acquit(self, token: str, worker: str, members: Sequence[tuple[str, str]]) -> None:
        mark, keep = self._roster.members[worker].mark, self._is_needed(worker)
        if self._scripts.acquit(token, worker, mark.text, members, keep=keep) and members:
            log.info("%s on %s survived", counted(len(members), "suspect"), worker)
        self._trials.pop(worker, None)
        self._roster.mark_stale()

    def _read_group(self, worker: str, mark: QuarantineMark) -> list[TrialMember]:
        """The group on a lane; read once for each trial by each leader."""
        entries: Any = self._yard.connection.xrange(self._yard.keys.lane(worker), min=mark.first)
        parsed = [parse_assignment(entry.decode(), fields) for entry, fields in entries]
        group = [one for one in parsed if isinstance(one, Assignment)]
        pipeline = self._yard.connection.pipeline(transaction=False)
        for one in group:
            ledger = self._yard.keys.ledger(one.request.client, one.request.id)
            pipeline.hmget(ledger, f"t{one.attempt - 1}", f"r{one.attempt - 1}", "relapsed")
        answers = pipeline.execute()
        return [_member(one, *known) for one, known in zip(group, answers, strict=True)]

    def _unproven(self, worker: str, members: Sequence[TrialMember]) -> list[TrialMember]:
        """Those that still run here and have not survived."""
        pipeline = self._yard.connection.pipeline(transaction=False)
        for one in members:
            pipeline.hmget(self._yard.keys.ledger(one.client, one.id), "worker", "attempt", "state")
            pipeline.strlen(self._yard.keys.tokens(one.client, one.id))
        answers = iter(pipeline.execute())
        now_ms = self._roster.broker_time.now_ms
        found: list[TrialMember] = []
        for one, owner, size in zip(members, answers, answers, strict=False):
            is_here = owner == [worker.encode(), b"%d" % one.attempt, b"assigned"]
            published = size // BYTES_PER_PACKED_TOKEN
            if is_here and not has_survived(one, published, now_ms, self._settings):
                found.append(one)
        return found


def _member(
    assignment: Assignment, began: bytes | None, ended: bytes | None, relapsed: bytes | None
) -> TrialMember:
    """``began`` and ``ended`` are the ledger's fields of the previous attempt."""
    end_ms = (ended or b"").partition(b" ")[0]
    start_ms = position((began or b"").partition(b" ")[0].decode(errors="replace"))[0]
    return TrialMember(
        client=assignment.request.client,
        id=assignment.request.id,
        attempt=assignment.attempt,
        streams=assignment.request.stream,
        published=len(assignment.published) // BYTES_PER_PACKED_TOKEN,
        began_ms=position(assignment.entry)[0],
        ran_ms=float(end_ms) - start_ms if end_ms.isdigit() and start_ms else 0.0,
        relapsed=max(0, whole(relapsed)),
    )


class ReloadTimeouts:
    """Restores the old weights where a reload was not ended in time: its command may have died."""

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
