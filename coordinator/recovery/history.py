"""What a retry has been through, and what follows from it: pure functions.

A crash says something about the requests that were running; a kill from outside does not. Each
request that may have caused a crash is a suspect, and is tried with ever fewer others
(`coordinator.routing.suspicion`), at last alone. Only a request that kills its worker while it runs
alone is given up, so its neighbours complete; and only the second time, since the first crash may
have had another cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenyard.protocol.errors import Code
from tokenyard.protocol.texts import counted


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How often is too often."""

    max_crashes: int  # workers lost with it for any reason before it must run alone
    max_crashed_alone: int  # workers that crashed while it ran alone
    max_lost_alone: int  # workers killed from outside while it ran alone
    max_faults: int  # times that an engine could not serve it


@dataclass(frozen=True, slots=True)
class History:
    """The fields of a retry that only the system writes.

    ``trial`` is the most suspects in its next trial, itself included; 0: it must run alone;
    None: it is no suspect.
    """

    crashes: int = 0
    suspected: int = 0
    crashed_alone: int = 0
    lost_alone: int = 0
    faults: int = 0
    not_before_ms: int = 0
    reason: str = ""
    published: int = 0  # tokens that its readers have seen
    choices: int = 0  # of how many of them the choice is known, where there are several choices
    trial: int | None = None

    def trial_size(self, limits: RetryLimits) -> int | None:
        """The most suspects it may run with, itself included; 0: alone; None: it is no suspect.

        A request that was lost too often with workers killed from outside must run alone as well.
        """
        if self.crashes - self.suspected >= limits.max_crashes:
            return 0
        return self.trial

    def failure(self, limits: RetryLimits, choices: int) -> tuple[Code, str] | None:
        """Why it is given up; None while it may run again."""
        if self.crashed_alone >= limits.max_crashed_alone:
            times = f"{counted(self.crashed_alone, 'worker')} crashed while it ran alone"
            return Code.POISONED, f"{times}, the last: {self.reason}"
        if self.lost_alone >= limits.max_lost_alone:
            were = "was" if self.lost_alone == 1 else "were"
            times = f"{counted(self.lost_alone, 'worker')} {were} lost while it ran alone"
            return Code.POISONED, f"{times}, the last: {self.reason}"
        if self.faults >= limits.max_faults:
            return Code.INFERENCE_ERROR, f"failed {self.faults} times, at last: {self.reason}"
        if choices > 1 and self.choices != self.published:
            return Code.WORKER_LOST, "which choice its published tokens belong to was lost"
        return None


def read_history(fields: Mapping[bytes, bytes]) -> History:
    """The history in a retry's fields; values that are not numbers count as 0."""
    return History(
        crashes=_count(fields, b"crashes"),
        suspected=_count(fields, b"suspected"),
        crashed_alone=_count(fields, b"crashed_alone"),
        lost_alone=_count(fields, b"lost_alone"),
        faults=_count(fields, b"faults"),
        not_before_ms=_count(fields, b"not_before"),
        reason=fields.get(b"reason", b"").decode(errors="replace"),
        published=len(fields.get(b"published", b"")) // 4,
        choices=len(fields.get(b"choices", b"")),
        trial=_count(fields, b"trial") if b"trial" in fields else None,
    )


def began_with(fields: Mapping[bytes, bytes]) -> str:
    """The base model of the worker that a retry was taken back from; "" where it is not known."""
    return fields.get(b"base_model", b"").decode(errors="replace")


def _count(fields: Mapping[bytes, bytes], name: bytes) -> int:
    raw = fields.get(name, b"")
    return int(raw) if raw.isdigit() and len(raw) < 16 else 0
