"""Limits of a tenant hold for what is written by a plain XADD, too."""

from __future__ import annotations

import pytest

from tests.scripts.quota_rig import counted, limit
from tests.scripts.tenant_rig import TOKENS, dispatch, result
from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.errors import Code
from tokenyard.scripts.answers import Transfer, TransferAnswer, Transferred


def push(yard: PlayedYard, name: str, **fields: str) -> QueuedRequest:
    """Write a request of the tenant by a plain XADD, 10 tokens and 20 to come."""
    params = '{"max_tokens":20}'
    entry = {"id": name, "prompt": "x" * 40, "tenant": "acme", "params": params, **fields}
    return yard.push(entry, make_request(name, tenant="acme", prompt="x" * 40))


def transfer(yard: PlayedYard, *waiting: QueuedRequest) -> list[TransferAnswer]:
    entries = [Transfer(one.entry, "acme", "anon", one.request.id, "d") for one in waiting]
    return yard.scripts.transfer(yard.token, "normal", entries)


class TestPlainEntries:
    @pytest.mark.parametrize(
        ("name", "most"),
        [("max_waiting_requests", 2), ("max_waiting_tokens", 20), ("tokens_per_minute", 60)],
    )
    def test_as_many_are_moved_as_fit(self, yard: PlayedYard, name: str, most: int) -> None:
        limit(yard, **{name: most})
        entries = [push(yard, f"q{number}") for number in range(3)]

        answers = transfer(yard, *entries)

        assert [one.code for one in answers] == [*[Transferred.MOVED] * 2, Transferred.QUOTA]
        assert answers[2].limit == name
        assert answers[2].retry_after_ms > 0
        # The refused one waits for its answer where it is.
        assert [entry for entry, _ in yard.intake("normal")] == [entries[2].entry]
        assert len(yard.intake("normal:acme")) == 2
        assert yard.answer(entries[2], Code.QUOTA_EXCEEDED).name == "DONE"

    def test_the_yards_bound_holds(self, yard: PlayedYard) -> None:
        yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 4)
        answers = transfer(yard, *(push(yard, f"q{number}") for number in range(3)))
        assert [one.code for one in answers] == [*[Transferred.MOVED] * 2, Transferred.QUOTA]
        assert answers[2].limit == "max_num_queued_reqs"

    def test_what_they_ask_for_may_be_among_their_common_fields(self, yard: PlayedYard) -> None:
        limit(yard, max_tokens=10)
        fields = {"id": "q", "prompt": "x", "tenant": "acme"}
        common = yard.push(
            {**fields, "common": '{"params":"{\\"max_tokens\\":11}"}'}, make_request("q")
        )
        plain = yard.push({**fields, "id": "r", "params": '{"max_tokens":10}'}, make_request("r"))
        answers = transfer(yard, common, plain)
        assert [one.code for one in answers] == [Transferred.QUOTA, Transferred.MOVED]
        assert answers[0].retry_after_s is None

    @pytest.mark.parametrize("how", ["completed", "cancelled"])
    def test_what_was_reserved_is_given_back(self, yard: PlayedYard, worker: str, how: str) -> None:
        limit(yard, tokens_per_minute=100)
        [moved] = transfer(yard, push(yard, "q"))
        assert moved.code is Transferred.MOVED
        assert counted(yard, "tokens_per_minute") == 30
        [(entry, _)] = yard.intake("normal:acme")
        waiting = QueuedRequest(make_request("q"), "normal:acme", entry)
        if how == "completed":
            yard.scripts.finish(worker, [result(dispatch(yard, worker, waiting), 3)])
        else:
            yard.scripts.cancel("anon", "q", "enough")
        assert counted(yard, "tokens_per_minute") == (TOKENS + 3 if how == "completed" else 0)
        assert yard.queued_tokens() == 0

    def test_a_known_request_is_reserved_once(self, yard: PlayedYard) -> None:
        limit(yard, tokens_per_minute=60)
        answers = transfer(yard, push(yard, "q"), push(yard, "q"))
        assert [one.code for one in answers] == [Transferred.MOVED] * 2
        assert counted(yard, "tokens_per_minute") == 30
