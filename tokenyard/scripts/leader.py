"""The scripts of the coordinator that leads."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tokenyard.protocol.errors import Code, reused
from tokenyard.protocol.keys import GROUP, INTAKE_CLASSES, IntakeClass, is_name
from tokenyard.protocol.replies import ErrorInfo, Reply, encode_reply, json_text
from tokenyard.protocol.wire import DEFAULT_RESULT_TTL_S, Refused, Request
from tokenyard.scripts.answers import (
    Answered,
    Dispatched,
    LedgerScan,
    LostRequest,
    Move,
    Reconciled,
)
from tokenyard.scripts.calls import Arg, Caller, codes
from tokenyard.scripts.destinations import destination

#: Answers of `LeaderScripts.rescue` beside the number of entries left.
RESCUE_NOT_LEADER: Final = -1
RESCUE_HELD: Final = -2
#: Answers of `LeaderScripts.acquit`.
ACQUIT_NOT_LEADER: Final = -1
ACQUIT_DONE: Final = 1
ACQUIT_CHANGED: Final = 0


class LeaderScripts(Caller):
    """What only the leader may do; every call that changes something compares its token."""

    def lead(self, name: str, lease_ms: int, token: str = "") -> str:
        """Take or keep the lead; the leader token, or "" while another leads."""
        keys = [self.keys.leader, self.keys.info]
        answer: bytes = self._run("lead", keys, [name, lease_ms, token])
        return answer.decode()

    def resign(self, token: str) -> bool:
        """Give up the lead; False if it was another's."""
        return bool(self._run("resign", [self.keys.leader, self.keys.events], [token]))

    def take_over(self, token: str, info: Mapping[str, Arg]) -> bool:
        """Make the groups of the streams and publish the handshake; False for a deposed leader."""
        keys = [self.keys.leader, self.keys.info]
        keys += [self.keys.intake(name) for name in INTAKE_CLASSES]
        args: list[Arg] = [token, GROUP]
        for item in info.items():
            args.extend(item)
        keys += [self.keys.events, self.keys.capacity, self.keys.cancelling]
        return bool(self._run("take_over", keys, args) == 1)

    def recognize(self, token: str, server: str, *, was_replica: bool) -> int:
        """Fence all workers where the server is a promoted replica; how many, or -1: deposed.

        ``server`` is the id of its process, which may have been a replica before.
        """
        keys = [self.keys.leader, self.keys.info, self.keys.leases]
        keys += [self.keys.departed, self.keys.events]
        fenced: int = self._run("recognize", keys, [token, server, int(was_replica)])
        return fenced

    def dispatch(self, token: str, moves: Sequence[Move]) -> list[Dispatched]:
        """Move entries onto lanes; one code for each, all NOT_LEADER for a deposed leader."""
        routes: dict[tuple[IntakeClass, str, int, int], int] = {}
        items: list[Arg] = []
        for move in moves:
            mode = 1 if move.alone else 2 if move.on_trial else 0
            route = (move.intake, move.worker, move.lane_limit, mode)
            number = routes.setdefault(route, len(routes) + 1)
            items += (number, move.entry, move.why, move.digest)
        keys = [self.keys.leader, self.keys.leases, self.keys.tally, self.keys.quarantine]
        args: list[Arg] = [token, GROUP, len(routes)]
        for intake, worker, limit, mode in routes:
            keys += [self.keys.intake(intake), self.keys.lane(worker)]
            args += [intake, worker, limit, mode]
        keys += [self.keys.ledger(move.client, move.request_id) for move in moves]
        return codes(Dispatched, self._run("dispatch", keys, args + items), len(moves))

    def answer(
        self,
        token: str,
        intake: IntakeClass,
        entry: str,
        request: Request | Refused,
        reply: Reply,
        *,
        dead: str = "",
        digest: str = "",
    ) -> Answered:
        """Give a waiting request its result without running it.

        With ``dead``, a reason, the request is also kept among the dead letters. So is one whose
        id is known with another ``digest``, which is given no result: the id's reply is another's.
        """
        client, request_id = request.client, request.id
        keys = [
            self.keys.leader,
            self.keys.intake(intake),
            self.keys.ledger(client, request_id),
            self.keys.tokens(client, request_id),
            destination(self.keys, request),
            self.keys.tally,
            self.keys.dead,
        ]
        args: list[Arg] = [token, GROUP, intake, entry, request.kind, reply.status or "failed"]
        args += [request.result_ttl_s, self._reply_maxlen, encode_reply(reply)]
        args += [dead, self._dead_maxlen, digest, reused(request_id)]
        return Answered(self._run("answer", keys, args))

    def bury(self, token: str, intake: IntakeClass, entry: str, reason: str) -> Answered:
        """Put an entry that nobody can be answered for into the dead letters."""
        keys = [self.keys.leader, self.keys.intake(intake), self.keys.dead]
        args: list[Arg] = [token, GROUP, intake, entry, reason, self._dead_maxlen]
        return Answered(self._run("bury", keys, args))

    def rescue(
        self,
        token: str,
        worker: str,
        entries: Sequence[tuple[str, str, str]] = (),
        trials: Sequence[int | None] | None = None,
    ) -> int:
        """Take back lane entries, given as (entry, client, request id), of a lost worker.

        ``trials`` says for each, should the worker have crashed, with how many suspects at most it
        may be tried again (0: alone), or None where it is none; by default all must run alone.
        Returns how many are left on its lane, `RESCUE_HELD` or `RESCUE_NOT_LEADER`. Call it
        first without entries, which ends the lease.
        """
        keys = [self.keys.leader, self.keys.leases, self.keys.workers]
        keys += [self.keys.lane(worker), self.keys.intake("retry")]
        keys += [self.keys.quarantine, self.keys.departed]
        args: list[Arg] = [token, worker]
        for at, (entry, client, request_id) in enumerate(entries):
            keys += [self.keys.ledger(client, request_id), self.keys.tokens(client, request_id)]
            keys.append(self.keys.choices(client, request_id))
            trial = trials[at] if trials else 0
            args += [entry, "" if trial is None else trial]
        left: int = self._run("rescue", keys, args)
        return left

    def acquit(
        self,
        token: str,
        worker: str,
        mark: str,
        members: Sequence[tuple[str, str]],
        *,
        keep: bool,
    ) -> int:
        """Free a group on trial, given as (client, request id); ``mark`` is what was seen.

        With ``keep`` the lane stays one for suspects. Returns `ACQUIT_DONE`, `ACQUIT_CHANGED` or
        `ACQUIT_NOT_LEADER`.
        """
        keys = [self.keys.leader, self.keys.quarantine]
        keys += [self.keys.ledger(client, request_id) for client, request_id in members]
        answer: int = self._run("acquit", keys, [token, worker, mark, "-" if keep else ""])
        return answer

    def overdue(self, intake: IntakeClass, after: str, count: int) -> tuple[str, list[str]]:
        """Entries past their deadline among ``count`` behind ``after`` ("-": from the first).

        Returns where to go on ("" at the end) and the entries.
        """
        cursor, *entries = self._run("overdue", [self.keys.intake(intake)], [after, count])
        return cursor.decode(), [entry.decode() for entry in entries]

    def astray(self, cursor: int, count: int) -> LedgerScan:
        """Requests whose entry is gone, among about ``count`` keys of the server."""
        keys = [self.keys.leases, self.keys.tally]
        after, ledgers, tokens, queued, found = self._run("astray", keys, [cursor, count])
        missed = [one for each in found for one in _astray(*each)]
        return LedgerScan(int(after), ledgers, tokens, queued, missed)

    def reconcile(
        self,
        token: str,
        lost: Sequence[LostRequest] = (),
        *,
        excess_tokens: int = 0,
        told: Mapping[str, Arg] = types.MappingProxyType({}),
    ) -> list[Reconciled]:
        """End requests whose entry is gone, and count ``excess_tokens`` fewer that wait.

        ``told`` are fields of `info` to be set. One code for each request; NOT_LEADER, at least
        once, for a deposed leader.
        """
        keys = [self.keys.leader, self.keys.info, self.keys.leases, self.keys.quarantine]
        keys.append(self.keys.tally)
        args: list[Arg] = [token, excess_tokens, DEFAULT_RESULT_TTL_S, self._reply_maxlen, GROUP]
        args.append(len(told))
        for item in told.items():
            args.extend(item)
        for one in lost:
            name = (one.client, one.request_id)
            place = self.keys.ledger(*name)
            if one.where and one.state == "waiting":
                place = self.keys.intake(one.where)  # type: ignore[arg-type]  # as the script read it
            elif one.where:
                place = self.keys.lane(one.where)
            keys += [self.keys.ledger(*name), self.keys.tokens(*name), place]
            keys += [self.keys.reply(*name), self.keys.replies(one.client)]
            error = json_text(ErrorInfo(Code.ENTRY_LOST, _lost_where(one)))
            args += [one.request_id, one.state, one.where, one.entry, error]
        answer = self._run("reconcile", keys, args)
        return codes(Reconciled, answer, max(1, len(lost)))

    def watch_clients(self, count: int) -> list[bytes]:
        """Clients whose leases have run out, by names that anybody may have written."""
        names: list[bytes] = self._run("watch_clients", [self.keys.clients], [count])
        return names


def _astray(
    name: bytes, state: bytes, where: bytes, entry: bytes, may_run: int
) -> Iterator[LostRequest]:
    """The request, unless somebody made up a ledger that can be none's."""
    client, _, request_id = name.partition(b"/")
    try:
        owner, own = client.decode(), request_id.decode()
    except UnicodeDecodeError:
        return
    if is_name(owner) and own:
        yield LostRequest(owner, own, state.decode(), where.decode(), entry.decode(), bool(may_run))


def _lost_where(one: LostRequest) -> str:
    if not one.where:
        return "its ledger names no place where it could be"
    stream = "intake:" if one.state == "waiting" else "lane:"
    return f"somebody deleted its entry from {stream}{one.where} (XDEL, XTRIM or XADD MAXLEN)"
