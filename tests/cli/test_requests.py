"""`tokenyard cancel`, `result` and `explain` against a running yard."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from click.testing import Result

from tests.cli.running import tokenyard
from tests.support.builders import random_name
from tests.support.waiting import eventually
from tokenyard import Client, RequestFailed
from tokenyard.keys import Keys
from tokenyard.program import Exit

Ask = Callable[..., Result]
#: A cancelled request must have its result after so long (issue: 0.5 s; the machine may be busy).
AT_ONCE_S = 2.0
LONG = 100_000


@pytest.fixture
def client(yard: dict[str, Any]) -> Iterator[Client]:
    with Client(yard["url"], client_id=random_name("client"), result_timeout_s=30) as client:
        yield client


@contextlib.contextmanager
def timed(limit_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


def test_a_running_request_is_cancelled_at_once(ask: Ask, client: Client) -> None:
    handle = client.submit("a long story", max_tokens=2000, stream=True)
    first = next(iter(handle))
    with timed(AT_ONCE_S):
        result = ask("cancel", handle.id, "--client", client.client_id)
        cancelled = handle.wait(AT_ONCE_S)
    assert result.exit_code == Exit.OK, result.output
    assert result.stdout == f"{client.client_id}/{handle.id}: cancelled\n"
    assert (cancelled.status, cancelled.tokens[:1]) == ("cancelled", first.tokens[:1])
    assert len(cancelled.tokens) < 2000


def test_cancelling_frees_the_workers_place(ask: Ask, client: Client, yard: dict[str, Any]) -> None:
    handles = client.submit_many(["a long story"] * 8, max_tokens=2000)
    eventually(lambda: all(each.status().state == "assigned" for each in handles))
    names = [handle.id for handle in handles]
    result = ask("cancel", *names, "--client", client.client_id, "--json")
    said = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(each["id"], each["cancel"]) for each in said] == [(n, "cancelled") for n in names]
    view = json.loads(ask("info", "--json").stdout)
    lanes = [Keys(view["yard"]).lane(worker["worker"]) for worker in view["workers"]]
    with redis.Redis.from_url(yard["url"]) as connection:
        assert eventually(lambda: not any(connection.xlen(lane) for lane in lanes))


def test_what_was_over_is_a_failure_and_what_nobody_knows_is_forestalled(
    ask: Ask, client: Client
) -> None:
    handle = client.submit("short", max_tokens=1)
    handle.result()
    over = ask("cancel", handle.id, "--client", client.client_id)
    assert over.exit_code == Exit.FAILED
    assert "was over already" in over.stdout
    unknown = ask("cancel", "not-yet", "--client", client.client_id)
    assert unknown.exit_code == Exit.OK
    assert "not known here" in unknown.stdout
    with pytest.raises(RequestFailed, match="CANCELLED"):
        client.submit("too late", id="not-yet").result()


def test_a_yard_without_a_coordinator_cancels_too(ask: Ask) -> None:
    result = ask("--yard", random_name("empty"), "cancel", "q", "--json")
    assert json.loads(result.stdout) == {"id": "q", "client": "anon", "cancel": "forestalled"}


def test_a_plain_request_is_cancelled_under_its_default_name(
    ask: Ask, yard: dict[str, Any]
) -> None:
    name = random_name("plain")
    keys = Keys("main")
    with redis.Redis.from_url(yard["url"]) as connection:
        fields = {"id": name, "prompt": "a long story", "params": '{"max_tokens": 2000}'}
        connection.xadd(keys.intake("normal"), fields)
        eventually(lambda: connection.hget(keys.ledger("anon", name), "state") == b"assigned")
    assert "cancelled" in ask("cancel", name).stdout
    later = ask("result", name)
    assert later.exit_code == Exit.FAILED
    assert "CANCELLED" in later.stderr


def test_a_result_can_be_read_by_others_and_again(ask: Ask, client: Client) -> None:
    handle = client.submit("hello", max_tokens=4)
    arguments = ("result", handle.id, "--client", client.client_id)
    first = ask(*arguments, "--timeout", "20")
    assert first.exit_code == Exit.OK, first.output
    assert first.stdout == handle.result().text + "\n"
    assert json.loads(ask(*arguments, "--json").stdout)["usage"]["completion_tokens"] == 4


def test_a_result_that_is_not_there_yet(ask: Ask, client: Client) -> None:
    handle = client.submit("a long story", max_tokens=2000, cancel_on_disconnect=True)
    result = ask("result", handle.id, "--client", client.client_id, "--timeout", "0.1")
    assert result.exit_code == Exit.TIMEOUT
    assert "no result yet" in result.stderr


@pytest.mark.parametrize("command", ["result", "explain"])
def test_a_request_that_nobody_knows(ask: Ask, command: str) -> None:
    result = ask(command, "nobody")
    assert result.exit_code == Exit.FAILED
    assert result.stderr.startswith("Error: the yard knows no request 'nobody'")


def test_a_timeline_goes_from_acceptance_to_result(ask: Ask, client: Client) -> None:
    handle = client.submit("hello", max_tokens=4)
    worker = handle.result().provenance.worker  # type: ignore[union-attr]
    arguments = ("explain", handle.id, "--client", client.client_id)
    lines = ask(*arguments).stdout.splitlines()
    assert lines[0].startswith(f"{client.client_id}/{handle.id}: completed after ")
    assert lines[1].startswith("0.000 s  accepted as normal/")
    assert f"attempt 1: to {worker} (round_robin, " in lines[2]
    assert "completed: 4 tokens" in lines[-1]
    timeline = json.loads(ask(*arguments, "--json").stdout)
    assert timeline["state"] == "completed"
    assert timeline["attempts"][0]["worker"] == worker
    assert timeline["events"][0]["at_ms"] == timeline["accepted_ms"]


def test_a_deadline_ends_a_running_request(ask: Ask) -> None:
    name = random_name("client")
    arguments = ("--client", name, "--id", "q", "--deadline-s", "0.5", "--max-tokens", "2000")
    result = ask("submit", *arguments, "--json", "a long story")
    assert result.exit_code == Exit.FAILED
    said = json.loads(result.stdout)
    assert (said["status"], said["error"]["code"]) == ("expired", "DEADLINE_EXCEEDED")
    assert 0 < len(said["tokens"]) < 2000
    assert "expired" in ask("explain", "q", "--client", name).stdout


def test_a_deadline_that_cannot_be_met_is_refused(ask: Ask, yard: dict[str, Any]) -> None:
    refused = ask("submit", "--refuse-late", "hello")
    assert refused.exit_code == Exit.USAGE
    assert "refuse_late: needs a deadline" in refused.stderr


def test_verbose_says_where_it_stands(ask: Ask) -> None:
    result = ask("submit", "--verbose", "hello")
    assert result.exit_code == Exit.OK
    assert "before it" in result.stderr
    accepted, answer = map(
        json.loads, ask("submit", "--verbose", "--json", "hi").stdout.split("\n")[:2]
    )
    assert (accepted["event"], accepted["position"]) == ("accepted", 0)
    assert (answer["event"], answer["id"]) == ("result", accepted["id"])


def test_what_a_killed_command_asked_for_is_cancelled_when_it_says_so(
    client: Client, yard: dict[str, Any]
) -> None:
    done = tokenyard(
        "--redis-url",
        yard["url"],
        "submit",
        "--client",
        "short-lived",
        "--id",
        "q",
        "--cancel-on-disconnect",
        "--timeout",
        "0.5",
        "--max-tokens",
        "2000",
        "a long story",
    )
    assert done.returncode == Exit.TIMEOUT, done.stderr
    done = tokenyard("--redis-url", yard["url"], "result", "q", "--client", "short-lived")
    assert done.returncode == Exit.FAILED
    assert "CANCELLED" in done.stderr
