"""`tokenyard empty` cancels waiting requests, and `requeue` lets failed ones wait again."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.cli.running import in_terminal, objects, read_until
from tests.support.builders import framed, make_request
from tests.support.yard import PlayedYard
from tokenyard.process.program import Exit
from tokenyard.protocol.wire import Request, request_fields


def only_result(yard: PlayedYard, request: Request) -> Any:
    """Check for the same single result in reply stream and ledger; return it."""
    replies = [reply for reply in yard.replies(request) if reply.id == request.id]
    results = [reply for reply in replies if reply.event == "result"]
    assert results == [yard.result(request)]
    return results[0]


@pytest.mark.long
def test_each_waiting_request_gets_one_result(quiet: PlayedYard, run: Any) -> None:
    """Given requests of `submit` and of plain XADDs, I expect one `cancelled` for each."""
    submitted, plain, low = make_request(), framed(), framed()
    quiet.submit(submitted)
    quiet.push(request_fields(plain), plain)
    quiet.submit(low, "low")

    done = run("empty", "--yes", "--why", "wrong prompts", "--json")

    assert done.returncode == Exit.OK, done.stderr
    said = json.loads(done.stdout)
    assert said["cancelled"] == {"retry": 0, "high": 0, "normal": 2, "low": 1}
    assert (said["left"], said["nobodys"]) == (0, 0)
    for request in (submitted, plain, low):
        result = only_result(quiet, request)
        assert result.status == "cancelled"
        assert "cancelled by an operator: wrong prompts" in result.error
    assert (quiet.intake(), quiet.intake("low")) == ([], [])
    assert quiet.queued_tokens() == 0


@pytest.mark.long
def test_empty_of_one_priority_leaves_the_others(quiet: PlayedYard, run: Any) -> None:
    kept, low = quiet.submit(), quiet.submit(priority_class="low")
    done = run("empty", "--class", "low", "--yes")
    assert (done.returncode, done.stdout) == (Exit.OK, "1 request cancelled: 1 low\n")
    assert quiet.ledger(kept.request)["state"] == "waiting"
    assert quiet.ledger(low.request)["state"] == "cancelled"


@pytest.mark.long
def test_empty_cancels_rescued_but_not_running_requests(quiet: PlayedYard, run: Any) -> None:
    dying, living = quiet.worker("dying"), quiet.worker("living")
    rescued = quiet.assign(dying)
    running = quiet.assign(living)
    quiet.expire(dying)
    quiet.rescue(dying)
    # A second entry of a running id is no separate request.
    quiet.push(request_fields(running.request), running.request)

    done = run("empty", "--yes", "--json")

    said = json.loads(done.stdout)
    assert (said["cancelled"]["retry"], said["left"]) == (1, 1)
    assert only_result(quiet, rescued.request).status == "cancelled"
    assert quiet.ledger(running.request)["state"] == "assigned"


@pytest.mark.long
def test_empty_leaves_entries_without_a_client(quiet: PlayedYard, run: Any) -> None:
    quiet.push({"prompt": "whose?"})
    done = run("empty", "--yes")
    assert done.returncode == Exit.OK
    assert done.stdout.startswith("0 requests cancelled\n1 left: without a client")
    assert len(quiet.intake()) == 1


@pytest.mark.long
def test_empty_of_an_empty_yard_asks_no_question(run: Any) -> None:
    done = run("empty")
    assert (done.returncode, done.stdout) == (Exit.OK, "Nothing waits.\n")


@pytest.mark.long
def test_empty_without_a_terminal_needs_yes(quiet: PlayedYard, run: Any) -> None:
    waiting = quiet.submit()
    done = run("empty")
    assert done.returncode == Exit.USAGE
    assert "Cancel 1 request that waits." in done.stderr
    assert "give --yes" in done.stderr
    assert quiet.ledger(waiting.request)["state"] == "waiting"


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "status", "state"),
    [(b"y\n", Exit.OK, "cancelled"), (b"n\n", Exit.FAILED, "waiting")],
)
def test_empty_on_a_terminal_asks(
    quiet: PlayedYard, yard: dict[str, Any], answer: bytes, status: Exit, state: str
) -> None:
    waiting = quiet.submit()
    command = ("--redis-url", yard["url"], "--yard", quiet.keys.yard, "empty")
    with in_terminal(*command) as (process, terminal):
        os.write(terminal, answer)
        said = read_until(terminal, b"")
        assert process.wait(60) == status
    assert b"Cancel 1 request that waits. Go on? [y/N]" in said
    assert quiet.ledger(waiting.request)["state"] == state


@pytest.mark.long
def test_empty_cancels_many_pages(quiet: PlayedYard, run: Any) -> None:
    pipeline = quiet.connection.pipeline(transaction=False)
    for _ in range(1203):
        pipeline.xadd(quiet.keys.intake("high"), request_fields(make_request()))
    pipeline.execute()
    done = run("empty", "--yes")
    assert done.stdout == "1203 requests cancelled: 1203 high\n"
    assert quiet.intake("high") == []


# requeue


def dead_letter(yard: PlayedYard, client: str = "anon") -> Request:
    """The dead letter of a failed request."""
    request = make_request(client=client)
    fields = {"dead_reason": "it killed its worker", "dead_sid": "low/1-0"}
    yard.connection.xadd(yard.keys.dead, fields | request_fields(request))
    return request


@pytest.mark.long
def test_a_failed_request_waits_again_under_its_id(quiet: PlayedYard, run: Any) -> None:
    request, namesake = dead_letter(quiet, "ann"), dead_letter(quiet)
    done = run("requeue", request.id, "--client", "ann")
    assert done.returncode == Exit.OK, done.stderr
    assert done.stdout == "1 request waits again\n"
    assert quiet.ledger(request)["state"] == "waiting"
    assert quiet.ledger(namesake) == {}
    again = run("requeue", request.id, "--client", "ann")
    assert again.returncode == Exit.FAILED
    assert "Nothing was requeued. 1: waits already" in again.stderr


@pytest.mark.long
def test_requeue_takes_all_letters_or_those_of_a_client(quiet: PlayedYard, run: Any) -> None:
    ann, bob = dead_letter(quiet, "ann"), dead_letter(quiet, "bob")
    quiet.connection.xadd(quiet.keys.dead, {"dead_reason": "id: is missing", "dead_sid": "low/1-0"})
    [only] = objects(run("requeue", "--all", "--client", "ann", "--json"))
    assert only == {"requeued": 1, "notes": []}
    assert (quiet.ledger(ann)["state"], quiet.ledger(bob)) == ("waiting", {})
    [other] = objects(run("requeue", "-a", "--json"))
    assert other["requeued"] == 1
    assert quiet.ledger(bob)["state"] == "waiting"
    assert run("requeue", "--all").stdout == "0 requests wait again\n"
