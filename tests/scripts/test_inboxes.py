"""collect.lua and settle.lua: inboxes of guests are read with bounds, and emptied once."""

from __future__ import annotations

import pytest

from tests.support.yard import Yard
from tokenyard.protocol.replies import Reply, decode_replies
from tokenyard.protocol.wire import MAX_FIELDS
from tokenyard.scripts import Haul, Notice
from tokenyard.scripts.inboxes import MORE_FIELDS

HIGHEST = "18446744073709551615-18446744073709551615"


def collect(yard: Yard, **bounds: int) -> Haul:
    given = {"most_memory": 1_000_000, "most_bytes": 1000, "most_entries": 10, **bounds}
    [haul] = yard.scripts.collect(["ann"], **given)
    return haul


def write(yard: Yard, fields: dict[str, str], entry: str = "*") -> str:
    inbox = yard.keys.inbox("ann")
    return str(yard.connection.xadd(inbox, dict(fields), id=entry).decode())  # type: ignore[union-attr]


def test_collected_entries_stay_until_they_are_settled(yard: Yard) -> None:
    entries = [write(yard, {"id": f"q{n}"}) for n in range(3)]
    for _ in range(2):
        assert [entry for entry, _ in collect(yard).entries] == entries
    assert yard.scripts.settle("ann", entries[:2], []) == 2
    assert collect(yard).entries == [(entries[2], {b"id": b"q2"})]
    assert yard.scripts.settle("ann", entries, []) == 1
    assert not yard.connection.exists(yard.keys.inbox("ann"))


@pytest.mark.parametrize(
    "fields", [{"x": "x" * 1000}, {f"{n}": "" for n in range(MAX_FIELDS + MORE_FIELDS + 1)}]
)
def test_a_too_large_entry_is_deleted(yard: Yard, fields: dict[str, str]) -> None:
    write(yard, fields)
    kept = write(yard, {"id": "q1"})
    haul = collect(yard)
    assert (haul.overrun, haul.deleted) == (0, 1)
    assert [entry for entry, _ in haul.entries] == [kept]
    assert yard.connection.xlen(yard.keys.inbox("ann")) == 1


def test_a_too_large_inbox_is_deleted_unread(yard: Yard) -> None:
    for _ in range(100):
        write(yard, {"x": "x" * 900})
    haul = collect(yard, most_memory=50_000)
    assert haul.overrun > 50_000
    assert haul.entries == []
    assert not yard.connection.exists(yard.keys.inbox("ann"))


def test_collect_returns_a_bounded_number_of_entries_and_bytes(yard: Yard) -> None:
    for _ in range(20):
        write(yard, {"x": "x" * 300})
    assert len(collect(yard).entries) == 4  # the entry that exceeds 1000 bytes is the last
    assert len(collect(yard, most_entries=2).entries) == 2
    assert collect(yard, most_entries=2).deleted == 0


def test_the_highest_entry_id_ends_the_scan_and_is_reset(yard: Yard) -> None:
    write(yard, {"id": "q1"}, HIGHEST)
    [(entry, _)] = collect(yard).entries
    assert yard.scripts.settle("ann", [entry], []) == 1
    assert write(yard, {"id": "q2"}) < HIGHEST
    assert len(collect(yard).entries) == 1


def test_each_of_several_inboxes_returns_its_own_entries(yard: Yard) -> None:
    yard.connection.xadd(yard.keys.inbox("bob"), {"id": "b"})
    write(yard, {"id": "a"})
    hauls = yard.scripts.collect(
        ["ann", "none", "bob"], most_memory=10**6, most_bytes=1000, most_entries=5
    )
    assert [[fields[b"id"] for _, fields in haul.entries] for haul in hauls] == [[b"a"], [], [b"b"]]


def test_notices_are_published_and_expire(yard: Yard) -> None:
    entry = write(yard, {"id": "q1"})
    reply = Reply(id="q1", event="receipt", seq=0, tokens=b"", receipt='{"receipt":"r"}')
    notices = [Notice("ann", "flat", reply), Notice("ann-1", "frame", reply)]
    yard.scripts.settle("ann", [entry], notices)
    for stream in (yard.keys.reply("ann", "q1"), yard.keys.replies("ann-1")):
        [(_, fields)] = yard.connection.xrange(stream)  # type: ignore[misc]
        [read] = decode_replies(fields)
        assert (read.event, read.receipt) == ("receipt", '{"receipt":"r"}')
        assert 0 < yard.connection.ttl(stream) <= 30  # type: ignore[operator]
