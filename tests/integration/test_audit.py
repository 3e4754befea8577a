"""The audit: what the library keeps of it, and what the command line writes and lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from tests.support.builders import random_name
from tests.support.servers import Server
from tokenyard.cli import main
from tokenyard.ops.audit import MAX_CHARACTERS, AuditEntry, find_entry, read_audit, record
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.yard import Yard

Command = Callable[..., Any]
EVIL = "<b>\x1b[31m\u202e\r\n"


@pytest.fixture
def yard() -> Keys:
    return Keys(random_name("yard"))


@pytest.fixture
def command(broker: Server, yard: Keys) -> Command:
    def run(*words: str) -> Any:
        options = ["--redis-url", broker.url, "--yard", yard.yard]
        env = {"COLUMNS": "200", "TOKENYARD_OPERATOR": "kim@north"}
        return CliRunner().invoke(main, [*options, *words], env=env)

    return run


def deed(number: int = 0, **more: Any) -> AuditEntry:
    given = {"who": "kim", "role": "admin", "action": "a.b", "target": f"t{number}"}
    return AuditEntry(**(given | more))


def test_entries_come_back_as_they_went_page_by_page(connection: redis.Redis, yard: Keys) -> None:
    for number in range(7):
        record(Yard(connection, yard), deed(number, why=EVIL, details={"a": EVIL}))
    first = read_audit(Yard(connection, yard), 4)
    assert [one.target for one in first] == ["t6", "t5", "t4", "t3"]
    rest = read_audit(Yard(connection, yard), 4, before=first[-1].entry)
    assert [one.target for one in rest] == ["t2", "t1", "t0"]
    assert (rest[0].why, rest[0].details) == (EVIL, {"a": EVIL})
    assert find_entry(Yard(connection, yard), rest[0].entry) == rest[0]


def test_what_is_too_long_is_cut_and_what_is_no_unicode_replaced(
    connection: redis.Redis, yard: Keys
) -> None:
    details = {f"n{number}": "x" * 10_000 for number in range(100)}
    record(Yard(connection, yard), deed(target="x" * 10**6, text="\ud800", details=details))
    (entry,) = read_audit(Yard(connection, yard))
    assert len(entry.target) == MAX_CHARACTERS
    assert entry.target.endswith("x…")
    assert entry.text == "?"
    assert len(entry.details) == 20
    assert max(map(len, entry.details.values())) == MAX_CHARACTERS


@pytest.mark.parametrize(
    "name",
    [*("", "x", "-", "0-0", "1", "+", "(1-1", "99999999999999999999-0", "1-99999999999999999999")],
)
def test_a_name_that_can_be_none_is_none(connection: redis.Redis, yard: Keys, name: str) -> None:
    record(Yard(connection, yard), deed())
    assert find_entry(Yard(connection, yard), name) is None
    assert len(read_audit(Yard(connection, yard), before=name)) == 1


def test_what_others_have_written_there_breaks_nothing(connection: redis.Redis, yard: Keys) -> None:
    for fields in ({"a": "b"}, {"details": "[1]", "who": b"\xff"}, {"details": b"\xff"}):
        connection.xadd(yard.audit, fields)  # type: ignore[arg-type]
    assert [one.details for one in read_audit(Yard(connection, yard))] == [{}, {}, {}]


def test_the_audit_is_bounded(connection: redis.Redis, yard: Keys) -> None:
    pipeline = connection.pipeline(transaction=False)
    for _ in range(10_500):
        pipeline.xadd(yard.audit, {"who": "x"})
    pipeline.execute()
    record(Yard(connection, yard), deed())
    assert connection.xlen(yard.audit) <= 10_200


def test_the_command_line_writes_it(command: Command, connection: redis.Redis, yard: Keys) -> None:
    made = json.loads(command("keys", "create", "--role", "viewer", "--json").stdout)
    command("keys", "revoke", made["key"])
    command("keys", "revoke", made["key"])  # there is none any more
    command("tenants", "set", "research", "--weight", "4")
    command("tenants", "set", "research", "--weight", "4")  # which changes nothing
    command("tenants", "remove", "research")
    command("cancel", "q1", "q2", "--client", "ann")
    command("pause", "--no-wait", "--why", "a move")
    entries = read_audit(Yard(connection, yard))[::-1]
    assert [(one.action, one.target, one.why) for one in entries] == [
        ("key.create", f"key {made['id']} with the role viewer", ""),
        ("key.revoke", f"key {made['id']} with the role viewer", ""),
        ("key.revoke", "", ""),
        ("tenant.set", "tenant research", ""),
        ("tenant.set", "tenant research", ""),
        ("tenant.remove", "tenant research", ""),
        ("request.cancel", "ann/q1, ann/q2", ""),
        ("signal.pause", "all workers", "a move"),
    ]
    assert {(one.who, one.role) for one in entries} == {("kim@north", "cli")}
    assert made["key"] not in repr(entries)


def test_the_command_lists_it(command: Command, connection: redis.Redis, yard: Keys) -> None:
    assert command("audit").stdout == "0 entries\n"
    for number in range(3):
        record(Yard(connection, yard), deed(number, text="done" + EVIL, why="why" + EVIL))
    record(Yard(connection, yard), deed(3, error="not now"))
    table = command("audit", "--limit", "3").stdout
    assert "3 entries" in table
    assert "refused: not now" in table
    assert "\x1b" not in table
    listed = json.loads(command("audit", "--json").stdout)
    assert [one["target"] for one in listed] == ["t3", "t2", "t1", "t0"]
    assert listed[1]["why"] == "why" + EVIL


def test_what_cannot_be_recorded_is_done_all_the_same(
    command: Command, connection: redis.Redis, yard: Keys
) -> None:
    connection.set(yard.audit, "no stream")
    done = command("keys", "create", "--tenant", "research")
    assert done.exit_code == 0
    assert "Warning: this is not in the audit" in done.stderr
    assert done.stdout.startswith("ty-")
