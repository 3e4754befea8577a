"""A coordinator and a worker in one, which a test steps by hand or runs in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import msgspec
import redis

from tests.contract.turns import taking_turns
from tests.support.builders import make_delta, make_result, worker_json
from tokenyard.protocol.keys import PRIORITY_CLASSES, Keys, Yard, intake_name
from tokenyard.protocol.parse import parse_assignment, parse_request
from tokenyard.protocol.replies import json_text
from tokenyard.protocol.wire import Assignment, Request, unpack_tokens
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Dispatched, Move, Publication, Published
from tokenyard.scripts.calls import load_scripts

LEASE_MS = 60_000
MODEL = "adder"


def answer_tokens(request: Request) -> list[int]:
    """The stand-in's answer: the prompt's tokens, each plus one."""
    if request.tokens is not None:
        return [token + 1 for token in unpack_tokens(request.tokens)]
    text = request.prompt or str((request.messages or [{}])[-1].get("content"))
    return [ord(letter) + 1 for letter in text]


def spell(tokens: Sequence[int]) -> str:
    """The text of such tokens."""
    return "".join(map(chr, tokens))


class StandIn(Yard):
    """Leads a yard and works in it, using only the scripts."""

    def __init__(self, connection: redis.Redis, keys: Keys) -> None:
        super().__init__(connection, keys)
        self.scripts = Scripts(self)
        self._token = ""
        self._published: dict[str, list[int]] = {}
        self.worker = ""
        #: Assignments by request id.
        self.lane: dict[str, Assignment] = {}
        self.seen: list[Request] = []

    @classmethod
    @contextmanager
    def at(cls, url: str, keys: Keys) -> Iterator[Self]:
        """One that has opened a yard of a server, until the block ends."""
        with redis.Redis.from_url(url, socket_timeout=30.0) as connection:
            stand_in = cls(connection, keys)
            stand_in.open()
            yield stand_in

    def open(self) -> None:
        """Lead, publish the handshake, and join as a worker."""
        load_scripts(self.connection)
        self._token = self.scripts.lead("stand-in", LEASE_MS)
        self.tell(
            protocol=1,
            models=msgspec.json.encode([MODEL]),
            default_model=MODEL,
            max_num_queued_reqs=10_000,
            max_request_bytes=1024 * 1024,
            coordinator="stand-in",
        )
        self.worker = self.scripts.register("w", LEASE_MS, worker_json("w", model=MODEL))

    def tell(self, **info: Any) -> None:
        """Change facts of the handshake."""
        self.connection.hset(self.keys.info, mapping=info)

    def dispatch(self) -> int:
        """Move all waiting requests onto the lane; their number."""
        taken = 0
        tenants = [name.decode() for name in self.connection.zrange(self.keys.line, 0, -1)]
        for intake in (
            intake_name(name, tenant) for tenant in ("", *tenants) for name in PRIORITY_CLASSES
        ):
            for entry, fields in self.connection.xrange(self.keys.intake(intake)):
                request = parse_request(fields)
                assert isinstance(request, Request), request
                self.seen.append(request)
                move = Move(
                    intake, entry.decode(), request.client, request.id, self.worker, 1_000_000
                )
                assert self.scripts.dispatch(self._token, [move]) == [Dispatched.DISPATCHED]
                taken += 1
        for entry, fields in self.connection.xrange(self.keys.lane(self.worker)):
            if b"cancel" in fields:
                self._abort(entry.decode(), fields[b"cancel"].decode())
                continue
            assignment = parse_assignment(entry.decode(), fields)
            assert isinstance(assignment, Assignment), assignment
            self.lane.setdefault(assignment.request.id, assignment)
        return taken

    def _abort(self, entry: str, cancelled: str) -> None:
        """Drop a request that was cancelled on the lane."""
        self.connection.xdel(self.keys.lane(self.worker), entry)
        self.lane = {key: each for key, each in self.lane.items() if each.entry != cancelled}

    def emit(self, request_id: str, tokens: Sequence[int], **fields: Any) -> None:
        """Publish a delta."""
        before = self._published.setdefault(request_id, [])
        fields.setdefault("text", spell(tokens) if self._wants_text(request_id) else None)
        delta = make_delta(request_id, len(before), tokens, **fields)
        publication = Publication(self.lane[request_id], delta)
        assert self.scripts.emit(self.worker, [publication]) == [Published.PUBLISHED]
        before += tokens

    def finish(self, request_id: str, tokens: Sequence[int] = (), **fields: Any) -> None:
        """Publish the result: the tokens of all deltas, and these."""
        self._finish_all([self._result(request_id, tokens, **fields)])

    def _result(self, request_id: str, tokens: Sequence[int], **fields: Any) -> Publication:
        before = self._published.pop(request_id, [])
        whole = [*before, *tokens]
        if fields.get("status", "completed") == "completed" and self._wants_text(request_id):
            fields.setdefault("text", spell(whole))
        result = make_result(request_id, whole, seq=len(before), **fields)
        return Publication(self.lane.pop(request_id), result)

    def _finish_all(self, results: Sequence[Publication]) -> None:
        codes = self.scripts.finish(self.worker, results)
        assert all(code is Published.PUBLISHED for code in codes)

    def _wants_text(self, request_id: str) -> bool:
        return self.lane[request_id].request.wants_text

    def fail(self, request_id: str, code: str, message: str) -> None:
        """Publish a failed result."""
        error = json_text({"code": code, "message": message})
        self.finish(request_id, status="failed", error=error)

    def answer_all(self) -> int:
        """One turn: dispatch and answer everything, after a delta if requested."""
        self.dispatch()
        results = []
        for request_id, assignment in list(self.lane.items()):
            tokens = answer_tokens(assignment.request)
            if assignment.request.stream:
                self.emit(request_id, tokens[:1])
                tokens = tokens[1:]
            results.append(self._result(request_id, tokens))
        if results:
            self._finish_all(results)
        return len(results)

    def running(self) -> AbstractContextManager[None]:
        """Answer everything in a thread until the block ends."""
        return taking_turns(self.answer_all)
