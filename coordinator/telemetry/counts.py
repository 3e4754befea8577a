"""What the coordinator counts while it works; `coordinator.telemetry.metrics` exports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Final

from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass
from tokenyard.protocol.replies import Status, status_of
from tokenyard.scripts.answers import Why
from tokenyard.telemetry.metrics import Histogram, Mean

#: Why a request is refused; `ID_REUSED` and what is too late by `submit` alone.
REFUSALS: Final = (
    *(Code.INVALID_REQUEST, Code.MODEL_UNAVAILABLE, Code.QUEUE_FULL),
    *(Code.DEADLINE_EXCEEDED, Code.ID_REUSED, Code.QUOTA_EXCEEDED),
)
#: Why an entry became a dead letter; the senders of the last two cannot be answered.
DEATHS: Final = (
    *(Code.POISONED, Code.INFERENCE_ERROR, Code.WORKER_LOST),
    *(Code.ID_REUSED, "UNANSWERABLE"),
)
#: Outcomes of requests that the coordinator answers.
ENDS: Final[tuple[Status, ...]] = ("failed", "expired")
#: Where clients write beside the intakes.
PLACES: Final = ("clients", "cancels", "info")
WHYS: Final[tuple[Why, ...]] = ("left", "lost", "crashed")
#: Why a worker is gone, by the end of its lease in ms; any other has run out.
_WHY_BY_LEASE: Final[dict[float, Why]] = {-1: "left", -2: "crashed"}


class CoordinatorCounts:
    """Counts from the start of the process, also as a standby.

    The coordinator's own thread writes here, at most once for each request and without a lock;
    each count begins at 0.
    """

    def __init__(self) -> None:
        #: By model ("" where it is unknown), priority class and outcome.
        self.results: Counter[tuple[str, str, str]] = Counter()
        self.rejected: Counter[str] = Counter(dict.fromkeys(map(str, REFUSALS), 0))
        self.dead: Counter[str] = Counter(dict.fromkeys(map(str, DEATHS), 0))
        #: Requests taken back from workers that are gone, by why these are.
        self.taken_back: Counter[str] = Counter(dict.fromkeys(WHYS, 0))
        #: Unreadable values that a client has written, by where they were.
        self.bad: Counter[str] = Counter(dict.fromkeys(PLACES, 0))
        self.swaps = 0
        self.queue_wait = {name: Histogram() for name in INTAKE_CLASSES}
        self.assign = Histogram()
        #: From 0 to 1, of each request that was dispatched by a policy that looks for prefixes.
        self.prefix_match = Mean()
        self.know([""])

    def know(self, models: Iterable[str]) -> None:
        """Begin the counts of these models."""
        for key in product(models, INTAKE_CLASSES, ENDS):
            self.results.setdefault(key, 0)

    def answered(self, model: str, intake: IntakeClass, code: Code, *, is_dead: bool) -> None:
        """A request has its result without a worker."""
        self.results[model, intake, status_of(code)] += 1
        if is_dead:
            self.dead[str(code)] += 1
        elif code in REFUSALS and code not in REFUSALS[-2:]:
            self.rejected[str(code)] += 1

    def took_back(self, lease_ms: float, count: int) -> None:
        """Requests were taken back from a worker whose lease ended so."""
        self.taken_back[_WHY_BY_LEASE.get(lease_ms, "lost")] += count

    def buried(self, reason: str = "UNANSWERABLE") -> None:
        """An entry whose sender cannot be answered became a dead letter."""
        self.dead[reason] += 1
