"""overdue.lua and watch_clients.lua: the coordinator's scans, once a second."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.yard import PlayedYard

PAST_MS, FUTURE_MS = 1_000, 9_999_999_999_999


def test_entries_past_their_deadline_are_found_and_stay(yard: PlayedYard) -> None:
    deadlines = [None, PAST_MS, FUTURE_MS, PAST_MS]
    waiting = [yard.submit(make_request(deadline_ms=deadline)) for deadline in deadlines]

    cursor, found = yard.scripts.overdue("normal", "-", 10, now_ms=yard.now_ms)

    assert (cursor, found) == ("", [waiting[1].entry, waiting[3].entry])
    assert len(yard.intake()) == 4


@pytest.mark.parametrize(("count", "sizes"), [(5, [2, 2, 1]), (4, [2, 2, 0])])
def test_a_scan_is_bounded_and_continues_where_it_stopped(
    yard: PlayedYard, count: int, sizes: list[int]
) -> None:
    waiting = [yard.submit(make_request(deadline_ms=PAST_MS)) for _ in range(count)]
    cursor, looks = "-", []
    while cursor:
        cursor, found = yard.scripts.overdue("normal", cursor, 2, now_ms=yard.now_ms)
        looks.append(found)

    assert [len(found) for found in looks] == sizes
    assert [entry for found in looks for entry in found] == [item.entry for item in waiting]


def test_empty_or_missing_intake_has_no_overdue_entries(yard: PlayedYard) -> None:
    assert yard.scripts.overdue("normal", "-", 10, now_ms=yard.now_ms) == ("", [])
    yard.connection.delete(yard.keys.intake("high"))
    assert yard.scripts.overdue("high", "-", 10, now_ms=yard.now_ms) == ("", [])


def test_of_two_deadlines_the_last_counts(yard: PlayedYard) -> None:
    stream = yard.keys.intake("normal")
    xadd = ("XADD", stream, "*", "id", "a", "prompt", "x", "deadline")
    yard.connection.execute_command(*xadd, PAST_MS, "deadline", FUTURE_MS)
    late = yard.connection.execute_command(*xadd, FUTURE_MS, "deadline", 1, "deadline", PAST_MS)

    assert yard.scripts.overdue("normal", "-", 10, now_ms=yard.now_ms) == ("", [late.decode()])


def test_unreadable_field_has_no_deadline(yard: PlayedYard) -> None:
    yard.push({"id": "a", "prompt": "x", "deadline": "soon"})
    for shared in ("", "{", "[]", "7", '{"deadline":1000}', '{"deadline":"soon"}'):
        yard.push({"id": "a", "prompt": "x", "common": shared})
    late = yard.push({"id": "b", "prompt": "x", "common": '{"deadline":"1000"}'})
    yard.push({"id": "c", "prompt": "x", "common": '{"deadline":"1000"}', "deadline": FUTURE_MS})

    assert yard.scripts.overdue("normal", "-", 10, now_ms=yard.now_ms) == ("", [late.entry])


def test_deadline_in_common_fields_holds_for_each_request(yard: PlayedYard) -> None:
    late, soon = '{"deadline":"1000"}', '{"deadline":"9999999999999"}'
    shared = [late, soon, late, "{", late, "{", soon]
    waiting = [
        yard.push({"id": f"{at}", "prompt": "x", "common": one}) for at, one in enumerate(shared)
    ]
    own = yard.push({"id": "own", "prompt": "x", "common": soon, "deadline": "1000"})

    expected = [waiting[at].entry for at in (0, 2, 4)] + [own.entry]
    assert yard.scripts.overdue("normal", "-", 10, now_ms=yard.now_ms) == ("", expected)


def test_clients_with_expired_leases_are_listed(yard: PlayedYard) -> None:
    yard.scripts.submit("normal", [make_request(client="ann")], watched="ann")
    yard.scripts.submit("normal", [make_request(client="bob")], watched="bob")
    assert yard.scripts.watch_clients(10, now_ms=yard.now_ms) == []

    yard.connection.zadd(yard.keys.clients, {"ann": 1, "eve": 2})

    assert yard.scripts.watch_clients(10, now_ms=yard.now_ms) == [b"ann", b"eve"]
    assert yard.scripts.watch_clients(1, now_ms=yard.now_ms) == [b"ann"]
    assert yard.connection.zcard(yard.keys.clients) == 3
