"""Shares of the tenants in line, and how long what waits will wait."""

from __future__ import annotations

import pytest

from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.tenants import TenantSettings
from tokenyard.yard.line import (
    InLine,
    TenantLine,
    seconds_by_class,
    seconds_by_tenant,
    shares_between,
)


def line(*, is_whole: bool = True, **had: float) -> TenantLine:
    tenants = [InLine(name, 1, 0, 0.0, one) for name, one in had.items()]
    return TenantLine(tenants, len(tenants), is_whole)


def test_shares_are_of_those_who_waited_at_both_moments() -> None:
    before = TenantLine([*line(ann=10, bob=10).tenants, InLine("eve", 1, 0, 0.0, 5)])
    heavy = InLine("bob", 1, 0, 0.0, 20, TenantSettings(weight=3))
    now = TenantLine([*line(ann=20, new=99).tenants, heavy])
    assert shares_between(before, now) == pytest.approx({"ann": 0.25, "bob": 0.75})


def test_nobody_has_had_any() -> None:
    assert shares_between(line(ann=10), line(ann=10)) == {}


@pytest.mark.parametrize(("before", "now"), [(True, False), (False, True)])
def test_shares_of_a_part_are_not_known(before: bool, now: bool) -> None:
    assert shares_between(line(is_whole=before, ann=1), line(is_whole=now, ann=2)) == {}


# Waits


def tenant(name: str, waiting: int, weight: float = 1.0) -> InLine:
    return InLine(name, waiting, 0, 0.0, 0.0, TenantSettings(weight=weight))


def test_retries_are_first_and_classes_share() -> None:
    waiting: dict[IntakeClass, int] = {"retry": 10, "high": 16, "normal": 4, "low": 10}

    found = seconds_by_class(waiting, rate_per_s=10.0)

    # After the retries 21 are served: all of high and normal and one of low; then the rest of low.
    assert found == pytest.approx({"retry": 1.0, "high": 3.1, "normal": 3.1, "low": 4.0})


def test_a_class_alone_has_the_whole_rate_and_an_empty_one_no_wait() -> None:
    found = seconds_by_class({"retry": 0, "high": 0, "normal": 0, "low": 30}, 10.0)

    assert found == {"low": 3.0}
    assert seconds_by_class({"low": 30}, 0.0) == {}


def test_tenants_share_by_weight() -> None:
    waiting = TenantLine([tenant("ann", 10, 3.0), tenant("bob", 10), tenant("", 0)])

    found = seconds_by_tenant(waiting, 10, rate_per_s=5.0)

    # Requests of no tenant are in line too, and nobody counts them: they keep their share.
    assert found == pytest.approx({"ann": 10 / 3 * 5 / 5, "bob": 10 / 3 + (10 - 10 / 3) * 2 / 5})


def test_tenants_behind_the_counted_ones_keep_their_share() -> None:
    waiting = TenantLine([tenant("ann", 10), *(tenant(f"t{n}", 0) for n in range(9))])

    assert seconds_by_tenant(waiting, 1, 5.0) == pytest.approx({"ann": 20.0})
    assert seconds_by_tenant(TenantLine([tenant("ann", 1)], is_whole=False), 1, 5.0) == {}
