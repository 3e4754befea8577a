"""The arithmetic of `benchmarks.fairness`: from what was observed of requests to its figures."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.fairness.loads import FLOODING, Ask
from benchmarks.measure import Latencies

#: Wait under a flood, at most this many times the wait without it, and one service time.
WAIT_TIMES: Final = 1.2
TARGETS: Final[Mapping[str, tuple[float, float]]] = {  # least and most
    "light_p99_ratio": (0.0, 1.0),
    "share_error": (0.0, 0.02),
    "throughput_ratio": (0.97, math.inf),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What was observed of a request. Times are seconds since the load began."""

    tenant: str
    ask: Ask
    due_s: float
    done_s: float = math.inf  # when its result came; none came: infinite
    engine_s: float = 0.0  # how long the engine had it
    first_token_s: float = 0.0  # after the engine got it; 0 unless it streamed
    is_right: bool = True

    @property
    def is_answered(self) -> bool:
        """Whether its result came."""
        return math.isfinite(self.done_s)

    @property
    def began_s(self) -> float:
        """When the engine got it."""
        return self.done_s - self.engine_s

    def wait_ms(self, end_s: float) -> float:
        """From its submission to its first token; without an answer, to the end of the run."""
        return 1000 * (min(self.began_s + self.first_token_s, end_s) - self.due_s)


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that counts."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s

    def has(self, sample: Sample) -> bool:
        """Whether a request was due in it."""
        return self.start_s <= sample.due_s < self.end_s

    def overlap_s(self, sample: Sample) -> float:
        """How long the engine had a request in it."""
        if not sample.is_answered:
            return 0.0
        return max(0.0, min(self.end_s, sample.done_s) - max(self.start_s, sample.began_s))

    def share(self, sample: Sample) -> float:
        """The part of a request's time in the engine that lies in it."""
        return self.overlap_s(sample) / sample.engine_s if sample.engine_s else 0.0


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile of one value or more."""
    if len(values) < 2:
        return values[0]
    return Latencies(values).percentile(percent)


def waits_ms(samples: Iterable[Sample], window: Window, end_s: float) -> list[float]:
    """The waits of the requests that were due in the window of a run that ended at ``end_s``."""
    return [one.wait_ms(end_s) for one in samples if window.has(one)]


def service(samples: Iterable[Sample], window: Window) -> dict[str, float]:
    """What each tenant had: weighted tokens, spread evenly over a request's time in the engine."""
    found: dict[str, float] = {}
    for one in samples:
        found.setdefault(one.tenant, 0.0)
        found[one.tenant] += one.ask.service * window.share(one)
    return found


def tokens_per_s(samples: Iterable[Sample], window: Window) -> float:
    """Tokens of prompts and answers per second."""
    tokens = ((len(one.ask.prompt) + len(one.ask.answer)) * window.share(one) for one in samples)
    return sum(tokens) / window.seconds


def in_engines(samples: Iterable[Sample], window: Window) -> float:
    """How many requests the engines had, on average: fewer where places were empty."""
    return sum(map(window.overlap_s, samples)) / window.seconds


def shares(had: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """What each tenant had of its due; 1 for all is exactly fair."""
    due = sum(had.values()) / sum(weights.values())
    return {name: had.get(name, 0.0) / (due * weight) for name, weight in weights.items()}


def share_error(of_due: Mapping[str, float]) -> float:
    """The largest deviation of any tenant from its due, as a part of it."""
    return max(abs(share - 1) for share in of_due.values())


def largest_difference(
    samples: Sequence[Sample], window: Window, weights: Mapping[str, float], steps: int = 120
) -> float:
    """Of two tenants that always wait: how far apart their service by weight came.

    In any interval of the window (divided into ``steps``), one of them had so much more than the
    other.
    """
    found = 0.0
    answered = [one for one in samples if one.is_answered]
    curves = {name: [0.0] for name in weights}
    for part in _parts(window, steps):
        had = service(answered, part)
        for name, weight in weights.items():
            curves[name].append(curves[name][-1] + had.get(name, 0.0) / weight)
    for one, other in itertools.combinations(curves.values(), 2):
        differences = [a - b for a, b in zip(one, other, strict=True)]
        found = max(found, max(differences) - min(differences))
    return found


def _parts(window: Window, steps: int) -> Iterator[Window]:
    length = window.seconds / steps
    for step in range(steps):
        start_s = window.start_s + step * length
        yield Window(start_s, start_s + length)


def overtakers(samples: Sequence[Sample]) -> int:
    """Requests of other tenants that were answered before an older one of the flood."""
    flood = sorted((one.due_s, one.done_s) for one in samples if one.tenant == FLOODING)
    dues = [due_s for due_s, _ in flood]
    latest = list(itertools.accumulate((done_s for _, done_s in flood), max, initial=0.0))
    return sum(
        one.done_s < latest[bisect.bisect_left(dues, one.due_s)]
        for one in samples
        if one.tenant != FLOODING
    )


def wrong_answers(samples: Iterable[Sample]) -> int:
    """How many answers were not the right ones."""
    return sum(not one.is_right for one in samples)


def light_ratio(flood_p99_ms: float, alone_p99_ms: float, service_ms: float) -> float:
    """The wait of a light tenant under a flood, by the largest that is wanted."""
    return flood_p99_ms / (WAIT_TIMES * alone_p99_ms + service_ms)


def missed(found: Mapping[str, float]) -> list[str]:
    """Targets that were missed or not measured, in words."""
    wrong = []
    for name, (least, most) in TARGETS.items():
        if name not in found:
            wrong.append(f"{name}: not measured")
        elif not least <= found[name] <= most:
            wanted = f"at most {most}" if math.isfinite(most) else f"at least {least}"
            wrong.append(f"{name}: {found[name]:.3f}, not {wanted}")
    return wrong
