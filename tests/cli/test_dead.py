"""`tokenyard dead` against a running yard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.cli.running import Ask, objects
from tests.support.builders import random_name
from tests.support.waiting import eventually
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys

KEYS = Keys("main")


@pytest.fixture
def connection(yard: dict[str, Any]) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(yard["url"]) as connected:
        yield connected
        connected.delete(KEYS.dead)


@pytest.fixture
def letter(connection: redis.Redis) -> dict[str, str]:
    """The dead letter of a failed request."""
    name = random_name("dead")
    fields = {"dead_reason": "it [killed] its worker", "dead_sid": "low/1-0"}
    fields |= {"id": name, "prompt": "hello", "params": '{"max_tokens": 3}', "reply_to": ""}
    entry = connection.xadd(KEYS.dead, fields)
    return {"letter": entry.decode(), "id": name}


@pytest.fixture
def nobodys(connection: redis.Redis) -> str:
    """The name of a letter without a client."""
    entry = connection.xadd(KEYS.dead, {"dead_reason": "id: is missing", "dead_sid": "low/1-0"})
    return str(entry.decode())


def test_the_list_is_a_table_or_json(ask: Ask, letter: dict[str, str], nobodys: str) -> None:
    shown = ask("dead", "list")
    assert shown.exit_code == Exit.OK, shown.output
    assert letter["letter"] in shown.stdout
    assert f"anon/{letter['id']}" in shown.stdout
    assert "it [killed] its worker" in shown.stdout
    assert shown.stdout.endswith("2 of 2 dead letters\n")
    listed = json.loads(ask("dead", "list", "--json").stdout)
    assert [each["letter"] for each in listed] == [nobodys, letter["letter"]]
    assert len(json.loads(ask("dead", "list", "--json", "--limit", "1").stdout)) == 1


def test_an_empty_list_succeeds(ask: Ask, connection: redis.Redis) -> None:
    assert ask("dead", "list").stdout == "0 of 0 dead letters\n"
    assert ask("dead", "requeue", "--all").exit_code == Exit.OK


def test_show_prints_the_whole_letter(ask: Ask, letter: dict[str, str]) -> None:
    shown = ask("dead", "show", letter["id"])
    for words in (letter["letter"], '{"max_tokens": 3}', "it [killed] its worker"):
        assert words in shown.stdout
    [whole] = objects(ask("dead", "show", letter["letter"], "--json"))
    assert whole["fields"]["prompt"] == "hello"


def test_a_requeued_request_gets_its_answer(ask: Ask, letter: dict[str, str]) -> None:
    requeued = ask("dead", "requeue", letter["letter"])
    assert requeued.exit_code == Exit.OK, requeued.output
    assert requeued.stdout == "1 dead letter requeued\n"
    answered = ask("result", letter["id"], "--timeout", "20", "--json")
    assert objects(answered)[0]["usage"]["completion_tokens"] == 3
    again = ask("dead", "requeue", letter["letter"])
    assert again.exit_code == Exit.FAILED
    assert again.stdout == "0 dead letters requeued. Not requeued: 1 (gone)\n"


def test_requeue_all_skips_unanswerable_letters(
    ask: Ask, letter: dict[str, str], nobodys: str, connection: redis.Redis
) -> None:
    requeued = ask("dead", "requeue", "--all", "--json")
    assert requeued.exit_code == Exit.FAILED
    [told] = objects(requeued)
    assert (told["requeued"], told["examples"]) == (1, [nobodys])
    assert "without a client" in next(iter(told["not_done"]))
    assert eventually(lambda: connection.hget(KEYS.ledger("anon", letter["id"]), "result"))


def test_drop_deletes_letters(
    ask: Ask, letter: dict[str, str], nobodys: str, connection: redis.Redis
) -> None:
    assert ask("dead", "drop", letter["id"]).stdout == "1 dead letter dropped\n"
    again = ask("dead", "drop", letter["id"])
    assert again.exit_code == Exit.FAILED
    assert f"there is no dead letter '{letter['id']}'" in again.stderr
    [told] = objects(ask("dead", "drop", "--all", "--json"))
    assert (told["dropped"], told["not_done"]) == (1, {})
    assert connection.xlen(KEYS.dead) == 0
