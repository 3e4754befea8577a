"""The numbers of a result, without numpy."""

from __future__ import annotations

import math

from tokenyard import Result


def numbers_of(result: Result) -> list[list[float] | None]:
    """Those of each input, flat; None for one that has failed."""
    found: list[list[float] | None] = []
    left = [*memoryview(result.data or b"").cast("f")]
    for shape in result.shapes or ():
        count = math.prod(shape or ())
        found.append(None if shape is None else left[:count])
        left = left if shape is None else left[count:]
    assert not left
    return found
