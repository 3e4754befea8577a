"""New weights for a model: the epoch that they get, and why a reload has failed, in words.

`tokenyard.admin.signals.Signals.reload` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from tokenyard.admin.signals import Unacknowledged
from tokenyard.protocol.control import DesiredState, DesiredStates


def is_checkpoint_path(path: str) -> bool:
    """Whether this may be a checkpoint: an absolute path, or "" for the model's own weights."""
    return not path or PurePosixPath(path).is_absolute()


def next_epoch(desired_states: DesiredStates, model: str) -> int:
    """The epoch after the present one; the first is 1."""
    return (desired_states.of("", model).epoch or 0) + 1


def reload_failure(
    model: str, now: DesiredState, unacknowledged: Sequence[Unacknowledged], timeout_s: float
) -> str:
    """One sentence: the worker, its reason, and the present state of the model."""
    one = next((each for each in unacknowledged if each.reason), unacknowledged[0])
    reason = one.reason or f"has not answered after {timeout_s:g} s"
    others = f" (and {len(unacknowledged) - 1} more)" if len(unacknowledged) > 1 else ""
    epoch = "" if now.epoch is None else f" in epoch {now.epoch}"
    weights = now.weights or "its own weights"
    return f"{one.name}{others}: {reason}; {model} is {now.run_state} with {weights}{epoch}"
