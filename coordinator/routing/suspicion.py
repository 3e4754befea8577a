"""Which requests a crash makes suspects, and with how many others each is tried next.

Suspects are tried in groups that share a worker. A group that crashes its worker again is split;
one that survives is innocent, and continues beside the next group. A request that runs alone and
crashes its worker is given up after so many times (`coordinator.dispatch.admission`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.streams import position

#: A group is split into so many parts. A trial costs a few tokens and a crash costs a start of a
#: process, so more than two parts find the culprit sooner; with many more, trials would wait for
#: each other.
PARTS: Final = 4
#: A lane's field of `quarantine` while nothing is on trial there but more suspects may come.
KEPT: Final = "-"


@dataclass(frozen=True, slots=True)
class QuarantineMark:
    """The suspects on trial on a lane: its field of the hash `quarantine`."""

    text: str = ""
    first: str = ""  # entry of a group; all entries behind it are on trial, too
    size: int = 0  # of that group

    @property
    def is_kept(self) -> bool:
        """Whether the lane is reserved for suspects, though none is on trial."""
        return self.text == KEPT

    @property
    def is_group(self) -> bool:
        """Whether several are on trial together, beside earlier entries."""
        return bool(self.first)

    @property
    def is_open(self) -> bool:
        """Whether the lane takes more requests."""
        return not self.text or self.is_kept

    def covers(self, entry: str) -> bool:
        """Whether that entry of the lane is on trial."""
        if self.is_group:
            return position(entry) >= position(self.first)
        return entry == self.text


UNMARKED: Final = QuarantineMark()


def read_mark(raw: bytes | None) -> QuarantineMark:
    """Read a field of `quarantine`."""
    text = (raw or b"").decode(errors="replace")
    first, plus, size = text.partition("+")
    if plus and first and size.isdecimal():
        return QuarantineMark(text, first, int(size))
    return QuarantineMark(text)


def next_trial(suspects: int) -> int:
    """How many of so many suspects are tried together next; 0: one of them, alone."""
    return 0 if suspects <= 1 else max(1, suspects // PARTS)


class CrashAnalysis:
    """Which requests on the lane of a crashed worker are suspects, in the order of the lane.

    Where a group was on trial, that group: the requests before it had been running without harm.
    Where none was, those that the engine had started. An engine takes requests in order and runs at
    most ``max_num_seqs`` of them; one that had just replaced another whose result was not published
    yet is missed, and the next crash finds it.
    """

    def __init__(self, mark: QuarantineMark, *, length: int, max_num_seqs: int) -> None:
        """``length`` is that of the lane."""
        self._mark = mark
        self._most = max(1, max_num_seqs)
        self._next = next_trial(mark.size if mark.is_group else min(length, self._most))
        self._seen = 0

    def trials(self, entries: Sequence[str]) -> list[int | None]:
        """The size of each entry's next trial (0: alone), or None where it is no suspect."""
        return [self._trial(entry) for entry in entries]

    def _trial(self, entry: str) -> int | None:
        self._seen += 1
        if self._mark.covers(entry):
            return self._next if self._mark.is_group else 0
        if self._mark.is_group or self._seen > self._most:
            return None
        return self._next


#: A stream on trial that publishes nothing gets so many times as long as any other.
_SLOW: Final = 12
#: On a new process a crash may take twice as long as before, plus so many ms.
_COLD_MS: Final = 500.0


@dataclass(frozen=True, slots=True)
class TrialMember:
    """A request of a group on trial, as it was when the trial began."""

    client: str
    id: str
    attempt: int
    streams: bool
    published: int  # tokens
    began_ms: float
    ran_ms: float = 0.0  # until its worker crashed the last time; 0: unknown
    relapsed: int = 0  # times that it was acquitted before


def has_survived(
    member: TrialMember, published: int, now_ms: float, settings: CoordinatorSettings
) -> bool:
    """Whether a request that still runs is probably past the point of the crash.

    What that takes grows with each wrong acquittal.
    """
    factor: int = 1 << min(member.relapsed, 16)
    runs_ms, most_ms = now_ms - member.began_ms, 1000 * settings.trial_s * factor
    if member.streams:
        if published - member.published >= settings.trial_tokens * factor:
            return True
        return runs_ms >= _SLOW * most_ms
    return runs_ms >= (min(most_ms, 2 * member.ran_ms + _COLD_MS) if member.ran_ms else most_ms)
