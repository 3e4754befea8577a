"""What reaches the engine loop: commands of the controller and what a lane session has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from tokenyard.protocol.wire import Assignment
from worker.messages import ToProcess


class Delivery(Struct, frozen=True):
    """Assignments from the lane of ``worker``."""

    worker: str
    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class Stale:
    """``worker`` may no longer publish for the request at this lane entry."""

    worker: str
    entry: str
    charged: str = ""  # `Aborted.charged`


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """``worker`` may no longer publish anything."""

    worker: str


InboxItem = Delivery | Stale | LeaseLost | ToProcess
