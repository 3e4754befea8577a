"""The audit: what the library keeps of it, and what the command line writes and lists."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.operating import Command
from tests.support.yard import PlayedYard
from tokenyard.ops.audit import MAX_CHARACTERS, AuditEntry, find_entry, read_audit, record

EVIL = "<b>\x1b[31m\u202e\r\n"


def deed(number: int = 0, **more: Any) -> AuditEntry:
    given = {"who": "kim", "role": "admin", "action": "a.b", "target": f"t{number}"}
    return AuditEntry(**(given | more))


def test_entries_come_back_as_they_went_page_by_page(yard: PlayedYard) -> None:
    for number in range(7):
        record(yard, deed(number, why=EVIL, details={"a": EVIL}))
    first = read_audit(yard, 4)
    assert [one.target for one in first] == ["t6", "t5", "t4", "t3"]
    rest = read_audit(yard, 4, before=first[-1].entry)
    assert [one.target for one in rest] == ["t2", "t1", "t0"]
    assert (rest[0].why, rest[0].details) == (EVIL, {"a": EVIL})
    assert find_entry(yard, rest[0].entry) == rest[0]


def test_what_is_too_long_is_cut_and_what_is_no_unicode_replaced(yard: PlayedYard) -> None:
    details = {f"n{number}": "x" * 10_000 for number in range(100)}
    record(yard, deed(target="x" * 10**6, text="\ud800", details=details))
    (entry,) = read_audit(yard)
    assert len(entry.target) == MAX_CHARACTERS
    assert entry.target.endswith("x…")
    assert entry.text == "?"
    assert len(entry.details) == 20
    assert max(map(len, entry.details.values())) == MAX_CHARACTERS


@pytest.mark.parametrize(
    "name",
    [*("", "x", "-", "0-0", "1", "+", "(1-1", "99999999999999999999-0", "1-99999999999999999999")],
)
def test_a_name_that_can_be_none_is_none(yard: PlayedYard, name: str) -> None:
    record(yard, deed())
    assert find_entry(yard, name) is None
    assert len(read_audit(yard, before=name)) == 1


def test_what_others_have_written_there_breaks_nothing(yard: PlayedYard) -> None:
    for fields in ({"a": "b"}, {"details": "[1]", "who": b"\xff"}, {"details": b"\xff"}):
        yard.connection.xadd(yard.keys.audit, fields)  # type: ignore[arg-type]
    yard.connection.xadd(yard.keys.audit, {"details": b'{"a":"\xff"}'})
    assert [one.details for one in read_audit(yard)] == [{}, {}, {}, {}]


def test_the_audit_is_bounded(yard: PlayedYard) -> None:
    pipeline = yard.connection.pipeline(transaction=False)
    for _ in range(10_500):
        pipeline.xadd(yard.keys.audit, {"who": "x"})
    pipeline.execute()
    record(yard, deed())
    assert yard.connection.xlen(yard.keys.audit) <= 10_200


def test_the_command_line_writes_it(command: Command, yard: PlayedYard) -> None:
    made = json.loads(command("keys", "create", "--role", "viewer", "--json").stdout)
    command("keys", "revoke", made["key"])
    command("keys", "revoke", made["key"])  # there is none any more
    command("tenants", "set", "research", "--weight", "4")
    command("tenants", "set", "research", "--weight", "4")  # which changes nothing
    command("tenants", "remove", "research")
    command("cancel", "q1", "q2", "--client", "ann")
    command("pause", "--no-wait", "--why", "a move")
    entries = read_audit(yard)[::-1]
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


def test_the_command_lists_it(command: Command, yard: PlayedYard) -> None:
    assert command("audit").stdout == "0 entries\n"
    for number in range(3):
        record(yard, deed(number, text="done" + EVIL, why="why" + EVIL))
    record(yard, deed(3, error="not now"))
    table = command("audit", "--limit", "3", COLUMNS="200").stdout
    assert "3 entries" in table
    assert "refused: not now" in table
    assert "\x1b" not in table
    listed = json.loads(command("audit", "--json").stdout)
    assert [one["target"] for one in listed] == ["t3", "t2", "t1", "t0"]
    assert listed[1]["why"] == "why" + EVIL


def test_what_cannot_be_recorded_is_done_all_the_same(command: Command, yard: PlayedYard) -> None:
    yard.connection.set(yard.keys.audit, "no stream")
    done = command("keys", "create", "--tenant", "research")
    assert done.exit_code == 0
    assert "Warning: this is not in the audit" in done.stderr
    assert done.stdout.startswith("ty-")
