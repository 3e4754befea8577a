"""`tokenyard requests`, `cancel`, `result` and `explain` against a running yard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.cli.running import Ask, objects, tokenyard
from tests.support.builders import random_name
from tests.support.servers import limited_user
from tests.support.waiting import eventually
from tokenyard import Client, RequestFailed
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys

#: Tokens of a request that runs for more than a minute.
LONG = 8000


@pytest.fixture
def client(yard: dict[str, Any]) -> Iterator[Client]:
    with Client(yard["url"], client_id=random_name("client"), result_timeout_s=30) as client:
        yield client


def test_a_running_request_is_cancelled_immediately(ask: Ask, client: Client) -> None:
    handle = client.submit("a long story", max_tokens=LONG, stream=True)
    first = next(iter(handle))
    result = ask("cancel", handle.id, "--client", client.client_id)
    cancelled = handle.wait(60.0)
    assert result.exit_code == Exit.OK, result.output
    assert result.stdout == "1 request cancelled\n"
    assert (cancelled.status, cancelled.tokens[:1]) == ("cancelled", first.tokens[:1])
    assert len(cancelled.tokens) < LONG


def test_cancel_fails_for_an_ended_and_succeeds_for_an_unknown_request(
    ask: Ask, client: Client
) -> None:
    handle = client.submit("short", max_tokens=1)
    handle.result()
    over = ask("cancel", handle.id, "--client", client.client_id)
    assert over.exit_code == Exit.FAILED
    assert "Nothing was cancelled. 1 request had ended already" in over.stderr
    unknown = ask("cancel", "not-yet", "--client", client.client_id)
    assert unknown.exit_code == Exit.OK
    assert "1 of them had not been looked at yet: they do not run" in unknown.stdout
    with pytest.raises(RequestFailed, match="CANCELLED"):
        client.submit("too late", id="not-yet").result()
    failed = ask("result", "not-yet", "--client", client.client_id)
    assert failed.exit_code == Exit.FAILED
    assert "CANCELLED" in failed.stderr


def test_cancel_needs_no_coordinator(ask: Ask) -> None:
    result = ask("--yard", random_name("empty"), "cancel", "p", "q", "--json")
    [told] = objects(result)
    assert (told["cancelled"], told["before_arrival"]) == (2, 2)
    assert told["requests"] == [
        {"client": "anon", "id": name, "cancel": "cancelled_before_arrival"} for name in "pq"
    ]


def test_a_result_can_be_read_repeatedly_by_other_clients(ask: Ask, client: Client) -> None:
    handle = client.submit("hello", max_tokens=4)
    arguments = ("result", handle.id, "--client", client.client_id)
    first = ask(*arguments, "--timeout", "20")
    assert first.exit_code == Exit.OK, first.output
    assert first.stdout == handle.result().text + "\n"
    assert json.loads(ask(*arguments, "--json").stdout)["usage"]["completion_tokens"] == 4


def test_a_missing_result_times_out(ask: Ask, client: Client) -> None:
    handle = client.submit("a long story", max_tokens=2000, cancel_on_disconnect=True)
    result = ask("result", handle.id, "--client", client.client_id, "--timeout", "0.1")
    assert result.exit_code == Exit.TIMEOUT
    assert "no result yet" in result.stderr


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


# The client of an id


@pytest.fixture
def connection(yard: dict[str, Any]) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(yard["url"]) as connected:
        yield connected


def test_the_client_of_an_id_is_found(ask: Ask, client: Client) -> None:
    handle = client.submit("hello", max_tokens=2)
    text = handle.result().text
    told = ask("explain", handle.id)
    assert told.exit_code == Exit.OK, told.output
    assert told.stdout.startswith(f"{client.client_id}/{handle.id}: completed")
    assert ask("result", handle.id).stdout == f"{text}\n"
    assert json.loads(ask("result", handle.id, "--json").stdout)["client"] == client.client_id
    over = ask("cancel", handle.id)
    assert "1 request had ended already" in over.stderr
    assert over.exit_code == Exit.FAILED
    requeued = ask("requeue", handle.id)
    assert "Nothing was requeued. 1: has completed" in requeued.stderr


@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_an_id_of_several_clients_is_an_error_that_names_them(
    ask: Ask, connection: redis.Redis, command: str
) -> None:
    """The command changes nothing, not even for its other ids."""
    name, keys = random_name("q"), Keys("main")
    for client in ("bob", "ann"):
        connection.hset(keys.ledger(client, name), mapping={"state": "waiting", "sid": "low/1-0"})
    refused = ask(command, name)
    assert refused.exit_code == Exit.USAGE
    assert "several clients have one: ann, bob; give --client NAME" in refused.stderr
    other = client_of_nobody = random_name("nobodys")
    if command == "cancel":
        assert ask("cancel", other, name).exit_code == Exit.USAGE
        assert not connection.exists(keys.ledger("anon", client_of_nobody))
    connection.delete(keys.ledger("ann", name), keys.ledger("bob", name))


def test_a_dead_letter_is_requeued_by_its_id_alone(ask: Ask, connection: redis.Redis) -> None:
    name, keys = random_name("dead"), Keys("main")
    fields = {"id": name, "client": "ann", "prompt": "hello", "dead_reason": "POISONED: twice"}
    connection.xadd(keys.dead, {**fields, "dead_sid": "low/1-0", "params": '{"max_tokens": 2}'})
    requeued = ask("requeue", name)
    assert requeued.exit_code == Exit.OK, requeued.output
    assert requeued.stdout == "1 request waits again\n"
    assert ask("result", name, "--timeout", "20").exit_code == Exit.OK


def test_a_user_who_may_not_scan_must_name_the_client(invoke: Ask, yard: dict[str, Any]) -> None:
    with limited_user(yard["url"], "+@all", "-scan") as url:
        refused = invoke("--redis-url", url, "explain", "unheard-of")
        assert refused.exit_code == Exit.USAGE
        assert "may not search for its client (SCAN); give --client" in refused.stderr
        listed = invoke("--redis-url", url, "requests")
        assert (listed.exit_code, listed.stderr[:5]) == (Exit.OK, "Note:")
        over = invoke("--redis-url", url, "requests", "--state", "completed")
        assert over.exit_code == Exit.UNAVAILABLE
        assert "may not run SCAN" in over.stderr


# The list


def test_the_list_is_a_table_or_json(ask: Ask, client: Client) -> None:
    done = client.submit("hello", max_tokens=3, id="done")
    done.result()
    running = client.submit("a long story", max_tokens=2000, id="running")
    eventually(lambda: running.status().state == "assigned")
    listed = ask("requests", "--client", client.client_id)
    assert listed.exit_code == Exit.OK, listed.output
    head, first, second, last = listed.stdout.splitlines()
    assert head.split()[:4] == ["Id", "Client", "State", "Model"]
    assert first.split()[:3] == ["running", client.client_id, "assigned"]
    assert second.split()[:4] == ["done", client.client_id, "completed", "simulated"]
    assert last == "2 requests"
    found = ask("requests", "--client", client.client_id, "--json", "--oldest")
    one, two = json.loads(found.stdout)
    assert (one["id"], one["state"], one["tokens"]) == ("done", "completed", 3)
    assert (two["id"], two["state"], two["attempt"]) == ("running", "assigned", 1)
    assert two["worker"]
    assert ask("requests", "--client", client.client_id, "--newer-than", "1d", "--limit", "1",
               "--state", "completed").stdout.splitlines()[-1] == "1 request"  # fmt: skip
    running.cancel()


def test_an_empty_list_succeeds(ask: Ask) -> None:
    nobody = ask("requests", "--client", random_name("nobody"))
    assert (nobody.exit_code, nobody.stdout, nobody.stderr) == (Exit.OK, "0 requests\n", "")


def test_a_truncated_list_ends_with_a_note(ask: Ask, client: Client) -> None:
    client.submit_many(["hello"] * 3, max_tokens=1)
    limited = ask("requests", "--client", client.client_id, "--limit", "2")
    assert "there may be more than --limit 2" in limited.stderr


def test_a_deadline_ends_a_running_request(ask: Ask) -> None:
    for deadline_s in (0.5, 3, 12):
        name = random_name("client")
        arguments = ("--client", name, "--id", "q", "--deadline-s", str(deadline_s))
        result = ask("submit", *arguments, "--max-tokens", str(LONG), "--json", "a long story")
        assert result.exit_code == Exit.FAILED
        said = json.loads(result.stdout)
        assert (said["status"], said["error"]["code"]) == ("expired", "DEADLINE_EXCEEDED")
        if said["tokens"]:
            break  # else a busy machine took longer than that to begin it
    assert 0 < len(said["tokens"]) < LONG
    assert "expired" in ask("explain", "q", "--client", name).stdout


@pytest.mark.long
def test_cancel_on_disconnect_follows_the_death_of_the_command(
    client: Client, yard: dict[str, Any]
) -> None:
    asked = ("submit", "--client", "short-lived", "--id", "q", "--cancel-on-disconnect")
    bounds = ("--timeout", "0.5", "--max-tokens", "2000")
    done = tokenyard("--redis-url", yard["url"], *asked, *bounds, "a long story")
    assert done.returncode == Exit.TIMEOUT, done.stderr
    done = tokenyard("--redis-url", yard["url"], "result", "q", "--client", "short-lived")
    assert done.returncode == Exit.FAILED
    assert "CANCELLED" in done.stderr
