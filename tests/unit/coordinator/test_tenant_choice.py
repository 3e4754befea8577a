"""Which tenants have series of their own: as few others over a day as possible."""

from __future__ import annotations

import random
from collections.abc import Mapping

from coordinator.telemetry.tenant_series import MOST_TENANTS, REVIEW_S, TenantChoice, TenantFigures

SCRAPE_S = 15.0
HOUR_S = 3600.0
MANY = {f"t{at:03}": 1000.0 - at for at in range(100)}
FIRST = list(MANY)[:MOST_TENANTS]


def look(choice: TenantChoice, had: Mapping[str, float], now_s: float) -> set[str]:
    """Update as a scrape does: of those that may be chosen only while somebody may be."""
    names = set(had) if choice.is_open(now_s) else {*choice.names}
    found = {name: TenantFigures(had.get(name, 0.0), is_there=name in had) for name in names}
    choice.update(found, set(had), now_s)
    return set(choice.names)


def test_few_tenants_are_all_chosen_as_soon_as_they_come() -> None:
    choice = TenantChoice()
    assert look(choice, {}, 0) == set()
    assert look(choice, {"ann": 1}, 15) == {"ann"}
    assert look(choice, {"ann": 1, "bob": 0}, 30) == {"ann", "bob"}


def test_of_many_those_that_had_most_are_chosen() -> None:
    assert look(TenantChoice(), MANY, 0) == set(FIRST)


def test_the_order_of_those_that_have_had_much_does_not_matter() -> None:
    """If the tenants overtake one another at every scrape, I expect the same series all day."""
    choice, had, chance = TenantChoice(), dict(MANY), random.Random(1)
    for at in range(int(24 * HOUR_S / SCRAPE_S)):
        for name in had:
            had[name] += chance.random()
        assert look(choice, had, at * SCRAPE_S) == set(FIRST)


def test_no_more_than_one_an_hour_gives_way() -> None:
    """If whoever is not chosen works, and the chosen rest, I expect few series over a day."""
    choice, had = TenantChoice(), dict(MANY)
    ever, before = set[str](), look(choice, had, 0)
    for at in range(int(24 * HOUR_S / SCRAPE_S)):
        for name in had.keys() - before:
            had[name] += 1
        now = look(choice, had, at * SCRAPE_S)
        assert len(now) == MOST_TENANTS
        assert len(now - before) <= 1
        ever |= now
        before = now
    assert MOST_TENANTS + 15 < len(ever) <= MOST_TENANTS + 24


def test_the_one_that_had_least_gives_way_to_one_that_had_much_more() -> None:
    choice, had = TenantChoice(), dict(MANY)
    look(choice, had, 0)
    for name in FIRST:
        had[name] += 10
    had[FIRST[7]] -= 5
    had |= {"t050": had["t050"] + 9, "t060": had["t060"] + 8}
    assert look(choice, had, REVIEW_S) == set(FIRST)  # twice as much is not exceeded
    for name in FIRST:
        had[name] += 10
    had[FIRST[7]] -= 6
    had |= {"t050": had["t050"] + 8, "t060": had["t060"] + 9}
    assert look(choice, had, 2 * REVIEW_S - 1) == set(FIRST)
    assert look(choice, had, 2 * REVIEW_S) == {*FIRST, "t060"} - {FIRST[7]}


def test_a_newcomer_counts_from_the_review_that_sees_it_first() -> None:
    choice, had = TenantChoice(), dict(MANY)
    look(choice, had, 0)
    had["new"] = 5000
    assert "new" not in look(choice, had, REVIEW_S)
    assert "new" not in look(choice, had, 2 * REVIEW_S)
    had["new"] += 1
    assert "new" in look(choice, had, 3 * REVIEW_S)


def test_who_is_gone_makes_room_at_once() -> None:
    choice = TenantChoice()
    look(choice, MANY, 0)
    left = {name: one for name, one in MANY.items() if name != FIRST[0]}
    assert FIRST[0] not in look(choice, left, 15)
    assert look(choice, left, 30) == {*FIRST[1:], "t020"}


def test_what_is_compared_is_bounded() -> None:
    """If others may be chosen each hour, I expect it to remember the last of them only."""
    choice = TenantChoice()
    for hour in range(50):
        others = {f"h{hour}.{at}": 1.0 for at in range(30)}
        found = {name: TenantFigures() for name in {*others, *choice.names, *choice.compared}}
        choice.update(found, others, hour * REVIEW_S)
    assert len(choice.compared) <= 30 + MOST_TENANTS
