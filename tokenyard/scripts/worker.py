"""The scripts of workers and their controllers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from tokenyard.protocol.control import Acknowledgement
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Reply, Usage, code_of, encode_cached
from tokenyard.protocol.wire import Assignment, ReplyKind
from tokenyard.protocol.worker_info import HostInfo, encode_host
from tokenyard.scripts.answers import CancelledUse, HandedBack, Publication, Published, Why
from tokenyard.scripts.calls import Arg, Caller, codes, destination

#: Answer of `WorkerScripts.retire` for a worker that the yard does not know.
RETIRE_UNKNOWN: Final = -1

Groups = list[tuple[tuple[str, ReplyKind], list[tuple[int, Publication]]]]

_read_usage = msgspec.json.Decoder(Usage).decode


class WorkerScripts(Caller):
    """Joining, renewing leases, publishing under the fence, leaving."""

    #: The server's time in ms at the last `emit`.
    emitted_ms = 0

    def register(self, name: str, lease_ms: int, info: bytes) -> str:
        """Join under ``name``; returns the worker's full name, with its incarnation."""
        keys = [self.keys.info, self.keys.workers, self.keys.leases, self.keys.events]
        answer: bytes = self._run("register", keys, [name, lease_ms, info])
        return answer.decode()

    def renew(self, lease_ms: int, workers: Sequence[tuple[str, bytes]]) -> list[bool]:
        """Extend leases and refresh roster entries, given as (worker, JSON).

        Returns whether each is held; a worker whose lease is lost must stop and register again.
        """
        args: list[Arg] = [lease_ms]
        for worker, info in workers:
            args += [worker, info]
        keys = [self.keys.leases, self.keys.workers, self.keys.events]
        answers = self._run("renew", keys, args)
        return codes(bool, answers, len(workers))

    def retire(self, worker: str, why: Why, reason: str = "") -> int:
        """End a worker's lease now; returns how many of its entries wait for the rescuer.

        ``reason`` is a text for the history of its requests.
        """
        keys = [self.keys.leases, self.keys.workers, self.keys.lane(worker), self.keys.events]
        keys += [self.keys.departed, self.keys.quarantine]
        return int(self._run("retire", keys, [worker, why, reason]))

    def publish_host(self, host: HostInfo) -> None:
        """Publish the models of a host; a plain command, which a server without memory refuses."""
        self.yard.connection.hset(self.keys.hosts, host.name, encode_host(host))

    def acknowledge(self, command_id: str, acknowledgement: Acknowledgement) -> None:
        """Report the outcome of a command at one worker, and wake the leader."""
        keys = [self.keys.acks(command_id), self.keys.events]
        packed = msgspec.json.encode(acknowledgement)
        self._run("acknowledge", keys, [acknowledgement.worker, packed])

    def hand_back(
        self,
        worker: str,
        assignment: Assignment,
        pause_ms: int,
        error: str,
        *,
        base_model: str = "",
    ) -> HandedBack:
        """Hand back a request that the engine could not serve, to be retried after a pause.

        ``base_model`` is the worker's, with which a request that names none goes on.
        """
        request = assignment.request
        keys = [self.keys.leases, self.keys.lane(worker), self.keys.capacity]
        keys += [self.keys.intake("retry"), self.keys.quarantine]
        name = (request.client, request.id)
        keys += [self.keys.ledger(*name), self.keys.tokens(*name), self.keys.choices(*name)]
        args: list[Arg] = [worker, assignment.entry, assignment.attempt, pause_ms, error]
        args.append(base_model)
        return HandedBack(self._run("hand_back", keys, args))

    def count_published(self, assignment: Assignment) -> int:
        """Published tokens of a request, over all choices."""
        request = assignment.request
        packed: Any = self.yard.connection.get(self.keys.tokens(request.client, request.id))
        return len(packed or b"") // 4

    def emit(
        self, worker: str, deltas: Sequence[Publication], trusted_until_ms: int = 0
    ) -> list[Published]:
        """Publish the deltas of one engine step; one code for each, in their order.

        After ``trusted_until_ms`` by the server's clock no delta is taken on trust.
        """
        keys = [self.keys.leases]
        args: list[Arg] = [worker, self._reply_maxlen, 0, trusted_until_ms]
        notes: list[Arg] = []
        several: list[tuple[int, str, int]] = []  # number, key and choice
        order = _by_destination(self.keys, deltas)
        for destinations, ((stream, kind), group) in enumerate(order, 1):
            keys.append(stream)
            args += [kind, len(group)]
            for _, item in group:
                assignment, reply = item.assignment, item.reply
                request = assignment.request
                keys.append(self.keys.ledger(request.client, request.id))
                keys.append(self.keys.tokens(request.client, request.id))
                seq = f"+{reply.seq}" if item.is_trusted else reply.seq
                args += (assignment.attempt, seq, reply.tokens, item.packed())
                number = (len(keys) - 1 - destinations) // 2
                if item.epoch is not None:
                    notes += ["epoch", number, len(keys) - 1, item.epoch]
                if request.reply_to and reply.cached_tokens is not None:
                    notes += ["cached", number, len(keys) - 1, encode_cached(reply)]
                if request.params.n > 1:
                    key = self.keys.choices(request.client, request.id)
                    several.append((number, key, reply.index))
        for number, key, index in several:
            keys.append(key)
            notes += ["choice", number, len(keys), bytes([index])]
        args[2] = len(several)
        args += notes
        answers = self._run("emit", keys, args)
        if isinstance(answers, list):
            self.emitted_ms = answers.pop()
        return _in_order(answers, order, len(deltas))

    def finish(self, worker: str, results: Sequence[Publication]) -> list[Published]:
        """Publish results and free their places; one code for each, in their order."""
        keys = [self.keys.leases, self.keys.lane(worker), self.keys.capacity]
        keys.append(self.keys.quarantine)
        work = sum(item.assignment.request.work for item in results)
        args: list[Arg] = [worker, self._reply_maxlen, work]
        order = _by_destination(self.keys, results)
        for (stream, kind), group in order:
            keys.append(stream)
            args += [kind, len(group)]
            for _, item in group:
                request, reply = item.assignment.request, item.reply
                may_have_tokens = request.stream or reply.seq > 0
                keys.append(self.keys.ledger(request.client, request.id))
                strings = int(may_have_tokens) * (2 if request.params.n > 1 else 1)
                if strings:
                    keys.append(self.keys.tokens(request.client, request.id))
                if strings > 1:
                    keys.append(self.keys.choices(request.client, request.id))
                args += (item.assignment.entry, item.assignment.attempt)
                args += (reply.status or "failed", request.result_ttl_s, item.packed())
                if item.assignment.is_charged:
                    args += (strings + 4, *_used(reply), code_of(reply))
                else:
                    args.append(strings)
        return _in_order(self._run("finish", keys, args), order, len(results))

    def settle_cancelled(self, worker: str, used: Sequence[CancelledUse]) -> list[bool]:
        """Charge cancelled requests what the engine had used; whether each has paid, in order.

        It has not where it is settled already, or was not cancelled on this worker's lane.
        """
        keys = [self.keys.ledger(one.client, one.request_id) for one in used]
        args: list[Arg] = [worker]
        for one in used:
            args += [one.entry, "" if one.input is None else one.input, one.cached, one.output]
        return codes(bool, self._run("settle_cancelled", keys, args), len(used))


def _used(reply: Reply) -> tuple[int, int, int]:
    """The tokens of a result: in, those of them that were cached, out."""
    if reply.usage is None:
        return 0, 0, len(reply.tokens) // 4
    usage = _read_usage(reply.usage)
    return usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens


def _in_order(answers: int | list[int], order: Groups, count: int) -> list[Published]:
    """The codes for items that were sent by destination, in the order of the items."""
    found = codes(Published, answers, count)
    if len(order) == 1 or (found and found[0] is Published.LEASE_LOST):
        return found
    places = (at for _, group in order for at, _ in group)
    by_place = dict(zip(places, found, strict=True))
    return [by_place[at] for at in range(count)]


def _by_destination(keys: Keys, items: Iterable[Publication]) -> Groups:
    """Group publications by reply stream, each with its index in ``items``."""
    groups: dict[tuple[str, str], list[tuple[int, Publication]]] = {}
    for at, item in enumerate(items):
        request = item.assignment.request
        whose = (request.reply_to, "") if request.reply_to else (request.client, request.id)
        groups.setdefault(whose, []).append((at, item))
    firsts = [(group[0][1].assignment.request, group) for group in groups.values()]
    return [(destination(keys, first), group) for first, group in firsts]
