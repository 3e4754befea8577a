"""The gateway's metrics as Prometheus reads them (docs/metrics.md)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, generate_latest

from tokenyard.telemetry.metrics import Histogram, Metric, histograms, numbers

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

ANSWERS = Metric(
    "tokenyard_http_answers_total",
    "counter",
    ("path", "status"),
    "Answers to HTTP requests, each counted when it begins.",
)
OPEN = Metric(
    "tokenyard_http_open", "gauge", (), "HTTP requests that are not answered to their end."
)
HEAD = Metric(
    "tokenyard_http_head_seconds",
    "histogram",
    ("path",),
    "From the arrival of a request to the head of its answer.",
)
#: All of them, as the page tells them.
METRICS: Final = (ANSWERS, OPEN, HEAD)
#: The label of all paths that are not endpoints, so that clients cannot make labels.
OTHER: Final = "other"


class GatewayMetrics:
    """Counts in the loop's thread; `collect` is called by another one."""

    def __init__(self, count_open: Callable[[], int]) -> None:
        self._count_open = count_open
        self._lock = threading.Lock()
        self._answers: Counter[tuple[str, str]] = Counter()
        self._heads: dict[tuple[str], Histogram] = {}

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer that has begun, by the path of its endpoint, or `OTHER`."""
        with self._lock:
            self._answers[path, str(status)] += 1
            self._heads.setdefault((path,), Histogram()).observe(seconds)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        registry: Any = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Family]:
        """The metrics as they are now."""
        with self._lock:
            answers = dict(self._answers)
            heads = {label: one.copy() for label, one in self._heads.items()}
        yield numbers(ANSWERS, answers)
        yield numbers(OPEN, {(): self._count_open()})
        yield histograms(HEAD, heads)
