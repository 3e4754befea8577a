"""Counters, histograms and how they become metrics of Prometheus.

Counting needs no library. `prometheus_client` (the extra ``metrics``) is loaded only where an
endpoint shows the metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Final, Literal, TypeVar

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

#: Upper bounds of the buckets of all histograms, in seconds; one more bucket is unbounded.
BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 240.0),
)
_LES: Final = (*map(str, BUCKETS_S), "+Inf")


@dataclass(slots=True)
class Histogram:
    """A histogram of durations. One thread writes; others may read."""

    counts: list[int] = field(default_factory=lambda: [0] * len(_LES))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Add one observation."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def add(self, other: Histogram) -> None:
        """Add the observations of another histogram."""
        self.counts = summed([self.counts, other.counts])
        self.sum_s += other.sum_s

    def copy(self) -> Histogram:
        """A copy of its current state."""
        return Histogram(self.counts.copy(), self.sum_s)


def trimmed(counts: Sequence[int]) -> list[int]:
    """Counts by bucket, without the empty buckets at the end."""
    last = max((at for at, count in enumerate(counts, 1) if count), default=0)
    return list(counts[:last])


def summed(lists: Iterable[Sequence[int]]) -> list[int]:
    """Counts by bucket of several histograms together; those at the end may be left out."""
    return [sum(each) for each in zip_longest(*lists, fillvalue=0)]


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """The time below which this share of the observations is; None without any.

    Within its bucket it is interpolated as Prometheus does: it is exact to a bucket. Beyond the
    last bound it is that bound.
    """
    wanted, seen = share * sum(counts), 0
    for at, count in enumerate(counts):
        if count and seen + count >= wanted:
            if at >= len(BUCKETS_S):
                break
            low = BUCKETS_S[at - 1] if at else 0.0
            return low + (BUCKETS_S[at] - low) * (wanted - seen) / count
        seen += count
    return BUCKETS_S[-1] if any(counts) else None


@dataclass(slots=True)
class Mean:
    """Count and sum of some values. One thread writes."""

    count: int = 0
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Add one observation."""
        self.count += 1
        self.total += value


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, by its name in Prometheus, with the names of its labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    labels: tuple[str, ...]
    help: str


#: Counted by the coordinator and by controllers.
REQUESTS = Metric(
    "tokenyard_requests_total",
    "counter",
    ("model", "priority", "outcome"),
    "Requests that have their result, each counted by the process that answered it.",
)
RETRIES = Metric(
    "tokenyard_retries_total",
    "counter",
    ("reason",),
    "Requests that went back to wait for another attempt, by what ended the last.",
)
#: The values of a metric's labels, in their order.
Labels = TypeVar("Labels", bound=tuple[str, ...])


def numbers(metric: Metric, values: Mapping[Labels, float]) -> Family:
    """A counter or a gauge for the endpoint."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def histograms(metric: Metric, values: Mapping[Labels, Histogram]) -> Family:
    """A histogram for the endpoint."""
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, histogram in values.items():
        buckets = [*zip(_LES, map(float, accumulate(histogram.counts)), strict=True)]
        family.add_metric(labels, buckets, histogram.sum_s)
    return family


def bucketed(metric: Metric, values: Mapping[Labels, Sequence[tuple[str, float]]]) -> Family:
    """A histogram without sum and count, by buckets of its own: bound, and how many are below."""
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, buckets in values.items():
        family.add_metric(labels, buckets, sum_value=None)
    return family


def summary(metric: Metric, mean: Mean) -> Family:
    """A sum and a count for the endpoint, without labels."""
    from prometheus_client.core import SummaryMetricFamily

    return SummaryMetricFamily(
        metric.name, metric.help, count_value=mean.count, sum_value=mean.total
    )
