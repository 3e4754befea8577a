"""The pinned list is complete on every Python and machine that it is for."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pin_requirements import LEFT_OUT, PINS, TARGETS


@pytest.mark.parametrize(
    "target", TARGETS, ids=lambda one: f"{one['python_full_version']}-{one['platform_machine']}"
)
def test_what_a_pinned_package_needs_is_pinned(target: dict[str, str]) -> None:
    lines = Path(PINS).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    there = {one.name for one in pins if one.marker is None or one.marker.evaluate(target)}
    missing, looked_at = set(), 0
    for name in there:
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # not for this Python or machine
        for need in map(Requirement, needs):
            looked_at += 1
            if need.marker is None or need.marker.evaluate(target | {"extra": ""}):
                missing |= {canonicalize_name(need.name)} - there - LEFT_OUT.keys()
    assert missing == set()
    assert looked_at > 500
