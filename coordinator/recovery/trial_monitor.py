"""Frees suspects whose trial is over: a group of them that has survived, or that has gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from coordinator.roster import Roster
from coordinator.routing.suspicion import QuarantineMark, TrialLimits, TrialMember, has_survived
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.streams import position, whole
from tokenyard.protocol.texts import counted
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts import ACQUIT_DONE, Scripts

log = logging.getLogger("tokenyard.coordinator.hearings")

#: Groups on trial are looked at so often.
LOOK_S: Final = 0.05
BYTES_PER_PACKED_TOKEN: Final = 4


@dataclass(slots=True)
class GroupTrial:
    """A group on trial."""

    mark: QuarantineMark
    everybody: Sequence[tuple[str, str]]  # client and id
    waits_for: list[TrialMember]  # those that are not past the crash yet


class TrialMonitor:
    """Sees when a group on trial has survived, and opens its lane for the next."""

    def __init__(
        self,
        connection: redis.Redis,
        scripts: Scripts,
        keys: Keys,
        roster: Roster,
        patience: TrialLimits,
        *,
        has_suspects: Callable[[str], bool],
    ) -> None:
        """``has_suspects`` says whether more of them wait for a model."""
        self._connection = connection
        self._scripts = scripts
        self._keys = keys
        self._roster = roster
        self._patience = patience
        self._has_suspects = has_suspects
        self._hearings: dict[str, GroupTrial] = {}  # by worker
        self._due = 0.0

    @property
    def patience_s(self) -> float:
        """How long nothing has to be looked at; without a trial that is for ever."""
        return max(0.0, self._due - time.monotonic()) if self._hearings else float("inf")

    def run_once(self, token: str) -> None:
        """Look at each lane on which a group is on trial, and at those kept for more."""
        marked = {w: m.mark for w, m in self._roster.members.items() if m.mark.text and m.has_lease}
        if not marked and not self._hearings:
            return  # nearly always
        for worker in self._hearings.keys() - marked.keys():
            del self._hearings[worker]
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_S
        for worker, mark in marked.items():
            if mark.is_group:
                self._hear(token, worker, mark)
            elif mark.is_kept and not self._is_needed(worker):
                self._acquit(token, worker, mark, (), keep=False)

    def _is_needed(self, worker: str) -> bool:
        return self._has_suspects(self._roster.members[worker].info.model)

    def _hear(self, token: str, worker: str, mark: QuarantineMark) -> None:
        hearing = self._hearings.get(worker)
        if hearing is None or hearing.mark != mark:
            members = self._read_members(worker, mark)
            everybody = [(one.client, one.id) for one in members]
            self._hearings[worker] = hearing = GroupTrial(mark, everybody, members)
        hearing.waits_for = self._not_yet(worker, hearing.waits_for)
        if not hearing.waits_for:
            self._acquit(token, worker, mark, hearing.everybody, keep=self._is_needed(worker))

    def _acquit(
        self,
        token: str,
        worker: str,
        mark: QuarantineMark,
        members: Sequence[tuple[str, str]],
        *,
        keep: bool,
    ) -> None:
        code = self._scripts.acquit(token, worker, mark.text, members, keep=keep)
        if code == ACQUIT_DONE and members:
            log.info("%s on %s survived", counted(len(members), "suspect"), worker)
        self._hearings.pop(worker, None)
        self._roster.mark_stale()

    def _read_members(self, worker: str, mark: QuarantineMark) -> list[TrialMember]:
        """The group as it lies on the lane; once for each trial, and by a new leader again."""
        entries: Any = self._connection.xrange(self._keys.lane(worker), min=mark.first)
        parsed = [parse_assignment(entry.decode(), fields) for entry, fields in entries]
        group = [one for one in parsed if isinstance(one, Assignment)]
        pipeline = self._connection.pipeline(transaction=False)
        for one in group:
            ledger = self._keys.ledger(one.request.client, one.request.id)
            pipeline.hmget(ledger, f"t{one.attempt - 1}", f"r{one.attempt - 1}", "relapsed")
        answers = pipeline.execute()
        return [_member(one, *known) for one, known in zip(group, answers, strict=True)]

    def _not_yet(self, worker: str, members: Sequence[TrialMember]) -> list[TrialMember]:
        """Those that still run here and have not survived."""
        pipeline = self._connection.pipeline(transaction=False)
        for one in members:
            pipeline.hmget(self._keys.ledger(one.client, one.id), "worker", "attempt", "state")
            pipeline.strlen(self._keys.tokens(one.client, one.id))
        answers = iter(pipeline.execute())
        now_ms = self._roster.server_ms()
        found: list[TrialMember] = []
        for one, owner, size in zip(members, answers, answers, strict=False):
            is_here = owner == [worker.encode(), b"%d" % one.attempt, b"assigned"]
            published = size // BYTES_PER_PACKED_TOKEN
            if is_here and not has_survived(one, published, now_ms, self._patience):
                found.append(one)
        return found


def _member(
    assignment: Assignment, began: bytes | None, ended: bytes | None, relapsed: bytes | None
) -> TrialMember:
    """``began`` and ``ended`` are what the ledger has of the attempt before."""
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
