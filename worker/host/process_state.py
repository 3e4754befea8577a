"""The states of a worker process."""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    """Life of a process."""

    DOWN = "down"  # no process; the next one starts after the pause
    WARMING = "warming"  # does everything that needs no model
    WARM = "warm"  # holds no model
    LOADING = "loading"  # loads or wakes a model
    READY = "ready"  # the engine is up
    DRAINING = "draining"  # finishes its requests
    DRAINED = "drained"  # has finished them
    ASLEEP = "asleep"  # the engine has released the device
    UNLOADING = "unloading"  # unloads the model, or falls asleep
    ATTACHED = "attached"  # lent to the leader of a group
    STOPPED = "stopped"  # ended for good


#: The process takes up its device.
AWAKE: Final = frozenset(
    {
        State.LOADING,
        State.READY,
        State.DRAINING,
        State.DRAINED,
        State.UNLOADING,
        State.ATTACHED,
    }
)
#: The process may be silent in these states for a bounded time only.
CHANGING: Final = frozenset({State.WARMING, State.LOADING, State.UNLOADING})
SERVING: Final = frozenset({State.READY, State.DRAINING})
