"""Which worker gets the next request: pure functions of what is known.

A policy sees the candidates and says one of them, or none if the request has to wait. It does no
I/O, reads no clock and keeps no state beside the turn that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Lane(Struct, frozen=True, gc=False):
    """A worker as a policy sees it."""

    worker: str
    name: str  # without the incarnation
    model: str
    load: int  # entries on the lane
    limit: int  # most entries that it takes
    is_quarantined: bool = False  # a suspect runs alone there

    @property
    def room(self) -> int:
        """How many more requests fit."""
        return 0 if self.is_quarantined else max(0, self.limit - self.load)

    @property
    def is_open(self) -> bool:
        """Whether one more request fits."""
        return self.room > 0


def round_robin(lanes: Sequence[Lane], last: str) -> Lane | None:
    """The next open lane behind the worker named ``last``, in the order of names.

    A full lane is passed over, so its turn is not waited for.
    """
    first = None
    for lane in lanes:
        if lane.is_open:
            if lane.name > last:
                return lane
            first = first or lane
    return first


def named(lanes: Sequence[Lane], name: str | None) -> Lane | None:
    """The lane of the worker of that name, or None while it is absent or full."""
    return next((lane for lane in lanes if lane.name == name and lane.is_open), None)
