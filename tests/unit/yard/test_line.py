"""Shares of the tenants in line."""

from __future__ import annotations

import pytest

from tokenyard.protocol.tenants import TenantSettings
from tokenyard.yard.line import InLine, TenantLine, shares_between


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
