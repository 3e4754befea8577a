"""submit.lua: a burst of requests is accepted, each at most once."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import redis

from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest, requests
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import SamplingParams
from tokenyard.scripts.answers import Submitted
from tokenyard.scripts.client import submit


def test_new_request_waits_under_its_server_id(yard: PlayedYard) -> None:
    request = make_request(model="adder", stream=True)

    (accepted,) = yard.scripts.submit("high", [request])

    ((entry, fields),) = yard.intake("high")
    assert accepted.code is Submitted.ACCEPTED
    assert accepted.sid == f"high/{entry}"
    assert parse_request(fields) == request
    assert yard.ledger(request) == {
        "state": "waiting",
        "sid": accepted.sid,
        "digest": request_digest(request),
    }


def test_class_of_the_system_is_refused_before_any_change(yard: PlayedYard) -> None:
    request = make_request()

    with pytest.raises(redis.ResponseError):
        yard.scripts.submit("retry", [request])  # type: ignore[arg-type]

    assert yard.intake("retry") == []
    assert yard.ledger(request) == {}


def test_empty_burst_changes_nothing(yard: PlayedYard) -> None:
    assert yard.scripts.submit("normal", []) == []
    assert yard.intake() == []


@pytest.mark.parametrize(
    ("other", "code"), [({}, Submitted.KNOWN), ({"model": "subtractor"}, Submitted.REUSED)]
)
def test_known_id_returns_the_state_of_the_first_request(
    yard: PlayedYard, worker: str, other: dict[str, str], code: Submitted
) -> None:
    waiting = yard.submit()

    def state() -> str:
        again = msgspec.structs.replace(waiting.request, **other)
        before = yard.ledger(waiting.request)
        (answer,) = yard.scripts.submit("high", [again])
        assert (answer.code, yard.ledger(waiting.request)) == (code, before)
        return answer.state

    assert state() == "waiting"
    assignment = yard.place(waiting, worker)
    assert state() == "assigned"
    yard.finish(worker, assignment)
    assert state() == "completed"
    assert yard.intake("high") == []
    reused = yard.connection.hget(yard.keys.tally, "count:ID_REUSED")
    assert reused == (b"3" if code is Submitted.REUSED else None)


def test_id_of_another_client_is_another_request(yard: PlayedYard) -> None:
    codes = [
        yard.scripts.submit("normal", [make_request("same", client=client)])[0].code
        for client in ("ann", "bob")
    ]

    assert codes == [Submitted.ACCEPTED] * 2


def test_id_given_twice_in_one_burst_is_accepted_once(yard: PlayedYard) -> None:
    request, other = requests(2)
    reusing = msgspec.structs.replace(request, params=SamplingParams(seed=1))

    answers = yard.scripts.submit("normal", [request, reusing, request, other])

    assert [answer.code for answer in answers] == [
        Submitted.ACCEPTED,
        Submitted.REUSED,
        Submitted.KNOWN,
        Submitted.ACCEPTED,
    ]
    assert len(yard.intake()) == 2


def test_refused_request_leaves_no_trace_and_is_accepted_later(yard: PlayedYard) -> None:
    yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 1)
    first = yard.submit()
    request = make_request()
    assert yard.scripts.submit("normal", [request])[0].code is Submitted.FULL
    assert yard.ledger(request) == {}

    yard.place(first, yard.worker())

    assert yard.scripts.submit("normal", [request])[0].code is Submitted.ACCEPTED


def test_full_yard_knows_its_accepted_requests(yard: PlayedYard) -> None:
    yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 1)
    first = yard.submit()

    (known,) = yard.scripts.submit("normal", [first.request])

    assert known.code is Submitted.KNOWN


def test_rescued_requests_count_as_waiting(yard: PlayedYard, worker: str) -> None:
    yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 1)
    yard.assign(worker)
    yard.lose(worker)

    assert yard.scripts.submit("normal", [make_request()])[0].code is Submitted.FULL


def test_burst_larger_than_one_lua_unpack_is_accepted(yard: PlayedYard) -> None:
    answers = yard.scripts.submit("normal", requests(2000))

    assert {answer.code for answer in answers} == {Submitted.ACCEPTED}
    assert len({answer.sid for answer in answers}) == 2000


def test_a_ledger_without_a_digest_is_not_compared(yard: PlayedYard) -> None:
    """Given a first request without a digest, I expect its id to be known."""
    request = make_request()
    other = msgspec.structs.replace(request, model="other")
    yard.connection.hset(yard.keys.ledger(request.client, request.id), "state", "waiting")
    (without,) = yard.scripts.submit("normal", [other])
    yard.connection.hset(yard.keys.ledger(request.client, request.id), "digest", "")
    (empty,) = yard.scripts.submit("normal", [other])

    assert (without.code, empty.code) == (Submitted.KNOWN, Submitted.KNOWN)


def test_a_submitter_without_a_digest_is_not_compared(
    yard: PlayedYard, waiting: QueuedRequest
) -> None:
    call = submit(yard.keys, "normal", [msgspec.structs.replace(waiting.request, model="other")])

    answer = yard.scripts.call(dataclasses.replace(call, args=[*call.args[:-2], "", ""]))

    assert [one.code for one in answer] == [Submitted.KNOWN]
