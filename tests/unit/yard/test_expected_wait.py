"""How long what waits will wait."""

from __future__ import annotations

import pytest

from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.tenants import TenantSettings
from tokenyard.yard.line import (
    InLine,
    TenantLine,
    seconds_by_class,
    seconds_by_tenant,
)


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
    line = TenantLine([tenant("ann", 10, 3.0), tenant("bob", 10), tenant("", 0)])

    found = seconds_by_tenant(line, 10, rate_per_s=5.0)

    # Requests of no tenant are in line too, and nobody counts them: they keep their share.
    assert found == pytest.approx({"ann": 10 / 3 * 5 / 5, "bob": 10 / 3 + (10 - 10 / 3) * 2 / 5})


def test_tenants_behind_the_counted_ones_keep_their_share() -> None:
    line = TenantLine([tenant("ann", 10), *(tenant(f"t{n}", 0) for n in range(9))])

    assert seconds_by_tenant(line, 1, 5.0) == pytest.approx({"ann": 20.0})
    assert seconds_by_tenant(TenantLine([tenant("ann", 1)], is_whole=False), 1, 5.0) == {}
