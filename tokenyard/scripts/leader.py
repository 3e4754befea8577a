"""The scripts of the leader."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from tokenyard.protocol.errors import Code, reused
from tokenyard.protocol.keys import INTAKE_CLASSES, PriorityClass, intake_name, is_name
from tokenyard.protocol.replies import (
    ErrorInfo,
    Reply,
    code_of,
    encode_reply,
    json_text,
    refusal_of_reuse,
)
from tokenyard.protocol.wire import DEFAULT_RESULT_TTL_S, Refused, Request
from tokenyard.scripts.answers import (
    Answered,
    Dispatched,
    LedgerScan,
    LostRequest,
    Move,
    Transfer,
    TransferAnswer,
    Transferred,
)
from tokenyard.scripts.calls import Arg, Caller, LostLeadership, codes, destination

#: Answer of `LeaderScripts.rescue` beside the number of entries left.
RESCUE_HELD: Final = -2


class LeaderScripts(Caller):
    """Calls for the leader only.

    Each one with a token raises `LostLeadership` where that is a former leader's.
    """

    def lead(self, name: str, lease_ms: int, token: str = "", *, stuck_ms: int = 0) -> str:
        """Take or keep the lead; returns the leader token, or "" while another leads.

        A lease of another that still ends at ``stuck_ms`` (unix ms) does not count.
        """
        keys = [self.keys.leader, self.keys.info]
        answer: bytes = self._run("lead", keys, [name, lease_ms, token, stuck_ms])
        return answer.decode()

    def resign(self, token: str) -> bool:
        """Give up the lead; returns False if another coordinator has it."""
        return bool(self._run("resign", [self.keys.leader, self.keys.events], [token]))

    def take_over(self, token: str, info: Mapping[str, Arg]) -> None:
        """Publish the handshake."""
        keys = [self.keys.leader, self.keys.info]
        self._run_as_leader("take_over", keys, [token, *chain.from_iterable(info.items())])

    def recognize(
        self,
        token: str,
        server: str,
        *,
        was_replica: bool,
        replication: str = "",
        replaces: str = "",
    ) -> int:
        """Fence all workers if the server is a promoted replica; returns their number.

        ``replication`` is its replication id. With ``replaces``, the id that it had as a replica,
        it is one only if the server seen last had that id. ``server`` is the id of the server's
        process, which may have been a replica before.
        """
        keys = [self.keys.leader, self.keys.info, self.keys.leases]
        keys += [self.keys.departed, self.keys.events]
        args: list[Arg] = [token, server, int(was_replica), replication, replaces]
        return int(self._run_as_leader("recognize", keys, args))

    def dispatch(self, token: str, moves: Sequence[Move]) -> list[Dispatched]:
        """Move entries to lanes; one code for each."""
        routes: dict[tuple[str, str, int, int], int] = {}
        items: list[Arg] = []
        charges: list[Arg] = []
        for at, move in enumerate(moves, 1):
            mode = 1 if move.alone else 2 if move.on_trial else 0
            route = (move.intake, move.worker, move.lane_limit, mode)
            number = routes.setdefault(route, len(routes) + 1)
            items += (number, move.entry, move.why, move.digest)
            if move.charge is not None:
                charges += (at, str(move.charge))
            if move.deadline_ms:
                charges += (-at, move.deadline_ms)
        keys = [self.keys.leader, self.keys.leases, self.keys.tally, self.keys.quarantine]
        args: list[Arg] = [token, len(routes)]
        for intake, worker, limit, mode in routes:
            keys += [self.keys.intake(intake), self.keys.lane(worker)]
            args += [intake, worker, limit, mode]
        keys += [self.keys.ledger(move.client, move.request_id) for move in moves]
        answers = self._run_as_leader("dispatch", keys, args + items + charges)
        return codes(Dispatched, answers, len(moves))

    def transfer(
        self, token: str, priority_class: PriorityClass, entries: Sequence[Transfer]
    ) -> list[TransferAnswer]:
        """Move entries of a common intake to their tenants'."""
        keys = [self.keys.leader, self.keys.intake(priority_class)]
        args: list[Arg] = [token]
        for one in entries:
            target = intake_name(priority_class, one.tenant)
            keys += [self.keys.intake(target), self.keys.ledger(one.client, one.request_id)]
            args += (one.entry, target, one.digest)
        answers = self._run_as_leader("transfer", keys, args)
        return [_transferred(*answer) for answer in answers]

    def recount(self, token: str, tenant: str) -> int:
        """Count what waits for a tenant, and put it in line or take it out; returns the count.

        "" stands for the common intakes, in line only while others are.
        """
        keys = [self.keys.leader, self.keys.line]
        return int(self._run_as_leader("recount", keys, [token, tenant]))

    def answer(
        self,
        token: str,
        intake: str,
        entry: str,
        request: Request | Refused,
        reply: Reply,
        *,
        dead: str = "",
        digest: str = "",
    ) -> Answered:
        """Give a waiting request its result without running it.

        With ``dead``, a reason, the request is also kept as a dead letter. So is a request whose id
        is known with another ``digest``, which gets no result, since the id's reply is the other's,
        but is told of it there.
        """
        client, request_id = request.client, request.id
        stream, kind = destination(self.keys, request)
        keys = [
            self.keys.leader,
            self.keys.intake(intake),
            self.keys.ledger(client, request_id),
            self.keys.tokens(client, request_id),
            stream,
            self.keys.tally,
            self.keys.dead,
        ]
        args: list[Arg] = [token, intake, entry, kind, reply.status or "failed"]
        args += [request.result_ttl_s, self._reply_maxlen, encode_reply(reply)]
        args += [dead, self._dead_maxlen, digest, reused(request_id), code_of(reply)]
        args.append(encode_reply(refusal_of_reuse(request_id)))
        return Answered(self._run_as_leader("answer", keys, args))

    def bury(self, token: str, intake: str, entry: str, reason: str) -> Answered:
        """Move an entry that cannot be answered to the dead letters."""
        keys = [self.keys.leader, self.keys.intake(intake), self.keys.dead]
        args: list[Arg] = [token, intake, entry, reason, self._dead_maxlen]
        return Answered(self._run_as_leader("bury", keys, args))

    def rescue(
        self,
        token: str,
        worker: str,
        entries: Sequence[tuple[str, str, str]] = (),
        trials: Sequence[int | None] | None = None,
        *,
        base_model: str = "",
    ) -> int:
        """Take back lane entries, given as (entry, client, request id), of a lost worker.

        Where the worker has crashed, ``trials`` has for each entry the most suspects that it may be
        tried with (0: alone), or None where it is not a suspect; by default all must run alone.
        ``base_model`` is the worker's, with which requests that name none go on. Returns how
        many are left on the lane, or `RESCUE_HELD`. Call it first without entries, which ends the
        lease.
        """
        keys = [self.keys.leader, self.keys.leases, self.keys.workers]
        keys += [self.keys.lane(worker), self.keys.intake("retry")]
        keys += [self.keys.quarantine, self.keys.departed]
        args: list[Arg] = [token, worker, base_model]
        for at, (entry, client, request_id) in enumerate(entries):
            keys += [self.keys.ledger(client, request_id), self.keys.tokens(client, request_id)]
            keys.append(self.keys.choices(client, request_id))
            trial = trials[at] if trials else 0
            args += [entry, "" if trial is None else trial]
        return int(self._run_as_leader("rescue", keys, args))

    def acquit(
        self, token: str, worker: str, mark: str, members: Sequence[tuple[str, str]], *, keep: bool
    ) -> bool:
        """Acquit a group on trial, given as (client, request id); ``mark`` is its mark as read.

        With ``keep`` the lane stays reserved for suspects. Returns False where something else is on
        trial there by now.
        """
        keys = [self.keys.leader, self.keys.quarantine]
        keys += [self.keys.ledger(client, request_id) for client, request_id in members]
        return bool(self._run_as_leader("acquit", keys, [token, worker, mark, "-" if keep else ""]))

    def overdue(
        self,
        intake: str,
        after: str,
        count: int,
        *,
        now_ms: float,
        old_until: Iterable[tuple[str, int]] = (),
    ) -> tuple[str, list[str]]:
        """Entries past their deadline among the ``count`` after ``after`` ("-": from the first).

        None, if the server's clock is not what ``now_ms`` says: it was set just now. Up to each
        entry of ``old_until`` times are to be moved by so many ms.

        Returns where to continue ("" at the end) and the entries.
        """
        args: list[Arg] = [after, count, round(now_ms)]
        for step in old_until:
            args += step
        cursor, *entries = self._run("overdue", [self.keys.intake(intake)], args)
        return cursor.decode(), [entry.decode() for entry in entries]

    def astray(self, cursor: int, count: int) -> LedgerScan:
        """Requests whose entry is missing, among about ``count`` keys of the server.

        And tenants who do not stand in line although they have something waiting.
        """
        keys = [self.keys.leases, self.keys.tally]
        after, ledgers, tokens, queued, found, tenants = self._run("astray", keys, [cursor, count])
        missed = [one for each in found for one in _astray(*each)]
        names = [tenant.decode() for tenant in tenants]
        return LedgerScan(int(after), ledgers, tokens, queued, missed, names)

    def reconcile(
        self,
        token: str,
        lost: Sequence[LostRequest] = (),
        *,
        excess_tokens: int = 0,
        info: Mapping[str, Arg] = types.MappingProxyType({}),
    ) -> list[bool]:
        """End requests whose entry is missing, and subtract ``excess_tokens`` from the queued ones.

        ``info`` has fields of the key `info` to set. Returns whether each request has ended; one
        stays whose entry is there, or that has moved since.
        """
        keys = [self.keys.leader, self.keys.info, self.keys.leases, self.keys.quarantine]
        keys.append(self.keys.tally)
        args: list[Arg] = [token, excess_tokens, DEFAULT_RESULT_TTL_S, self._reply_maxlen]
        args += [len(info), *chain.from_iterable(info.items())]
        for one in lost:
            name = (one.client, one.request_id)
            place = self.keys.ledger(*name)
            if one.where and one.state == "waiting":
                place = self.keys.intake(one.where)
            elif one.where:
                place = self.keys.lane(one.where)
            keys += [self.keys.ledger(*name), self.keys.tokens(*name), place]
            keys += [self.keys.reply(*name), self.keys.replies(one.client)]
            error = json_text(ErrorInfo(Code.ENTRY_LOST, _lost_where(one)))
            args += [one.request_id, one.state, one.where, one.entry, error]
        return codes(bool, self._run_as_leader("reconcile", keys, args), len(lost))

    def record(self, token: str, fields: Mapping[str, Arg], max_entries: int) -> None:
        """Add an entry to the history, with what waits."""
        keys = [self.keys.leader, self.keys.history, self.keys.tally]
        keys += [self.keys.intake(name) for name in INTAKE_CLASSES]
        args = [token, max_entries, *INTAKE_CLASSES, *chain.from_iterable(fields.items())]
        if not self._run("record", keys, args):
            raise LostLeadership

    def stand_by(self, name: str, for_ms: int) -> None:
        """Show for some time that a coordinator stands by; 0: no more."""
        self._run("stand_by", [self.keys.standbys], [name, for_ms])

    def watch_clients(self, count: int, *, now_ms: float) -> list[bytes]:
        """Clients whose leases have expired; the names are untrusted.

        None, if the server's clock is not what ``now_ms`` says: it was set just now.
        """
        args: list[Arg] = [count, round(now_ms)]
        names: list[bytes] = self._run("watch_clients", [self.keys.clients], args)
        return names

    def shift_leases(self, token: str, ahead_ms: float, longest_ms: int, count: int) -> int:
        """Correct leases after a step of the server's clock, ``count`` of each kind at most.

        A step of ``ahead_ms`` (0: back, or none) prolongs those that held before it; none is longer
        than ``longest_ms``. Returns how many were corrected of the kind of which most were.
        """
        keys = [self.keys.leader, self.keys.leases, self.keys.clients]
        args: list[Arg] = [token, round(ahead_ms), longest_ms, count]
        return int(self._run_as_leader("shift_leases", keys, args))


def _transferred(code: int, text: bytes, retry_after_ms: int = 0) -> TransferAnswer:
    found = Transferred(code)
    limit = text.decode() if found is Transferred.QUOTA else ""
    return TransferAnswer(found, limit, retry_after_ms)


def _astray(
    name: bytes, state: bytes, where: bytes, entry: bytes, may_run: int
) -> Iterator[LostRequest]:
    """The request, unless its ledger has an invalid name."""
    client, _, request_id = name.partition(b"/")
    try:
        owner, own = client.decode(), request_id.decode()
    except UnicodeDecodeError:
        return
    if is_name(owner) and own:
        yield LostRequest(owner, own, state.decode(), where.decode(), entry.decode(), bool(may_run))


def _lost_where(one: LostRequest) -> str:
    if not one.where:
        return "its ledger names no valid place"
    stream = "intake:" if one.state == "waiting" else "lane:"
    return f"somebody deleted its entry from {stream}{one.where} (XDEL, XTRIM or XADD MAXLEN)"
