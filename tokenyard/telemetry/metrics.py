"""What coordinator and controller measure, and the endpoint where Prometheus reads it.

Counting needs no library. The text of the endpoint is made by `prometheus_client` (the extra
``metrics``), which is loaded only where there is one.
"""

from __future__ import annotations

import importlib.util
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from tokenyard.protocol.errors import SettingsError
from tokenyard.telemetry.health import Health

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric as Family

#: Upper bounds of all histograms, in seconds; one more bucket takes what is beyond.
BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 240.0),
)
_LES: Final = (*map(str, BUCKETS_S), "+Inf")
_PLAIN: Final = "text/plain; version=0.0.4"
_STOP_S: Final = 5.0


@dataclass(slots=True)
class Histogram:
    """How often something took how long. One thread writes; others may read meanwhile."""

    counts: list[int] = field(default_factory=lambda: [0] * len(_LES))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one more."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def add(self, other: Histogram) -> None:
        """Count all that another has counted."""
        self.counts = [
            ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.sum_s += other.sum_s

    def copy(self) -> Histogram:
        """As it is now."""
        return Histogram(self.counts.copy(), self.sum_s)


@dataclass(slots=True)
class Mean:
    """How often something was seen, and the sum of what it was. One thread writes."""

    count: int = 0
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count one more."""
        self.count += 1
        self.total += value


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name as Prometheus has it, and what the labels are."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    labels: tuple[str, ...]
    help: str


#: The values of a metric's labels, in their order.
Labels = TypeVar("Labels", bound=tuple[str, ...])


def numbers(metric: Metric, values: Mapping[Labels, float]) -> Family:
    """A counter or a gauge as the endpoint shows it."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def histograms(metric: Metric, values: Mapping[Labels, Histogram]) -> Family:
    """A histogram as the endpoint shows it."""
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, histogram in values.items():
        family.add_metric(labels, _cumulative(histogram.counts), histogram.sum_s)
    return family


def summary(metric: Metric, mean: Mean) -> Family:
    """A sum and a count as the endpoint shows them, without labels."""
    from prometheus_client.core import SummaryMetricFamily

    return SummaryMetricFamily(
        metric.name, metric.help, count_value=mean.count, sum_value=mean.total
    )


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for le, count in zip(_LES, counts, strict=True):
        total += count
        buckets.append((le, float(total)))
    return buckets


class Collector(Protocol):
    """What knows the metrics of a process; asked anew for each scrape, by another thread."""

    def collect(self) -> Iterable[Family]:
        """All of them as they are now."""


class Endpoint:
    """Shows one process at ``http://host:port``, from a thread of its own.

    ``/metrics`` is for Prometheus, ``/livez`` and ``/readyz`` are for probes: status 200 and
    ``ok``, or 503 and the reason.
    """

    def __init__(self, collector: Collector, health: Health, host: str, port: int) -> None:
        """Raises `SettingsError` where the extra is missing."""
        if importlib.util.find_spec("prometheus_client") is None:
            raise SettingsError(["metrics_port: needs more: pip install 'tokenyard[metrics]'"])
        self._collector = collector
        self._health = health
        self._host = host
        self._port = port
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen; raises `SettingsError` where that cannot be."""
        from prometheus_client import CollectorRegistry, make_wsgi_app

        from tokenyard.telemetry.server import make_server

        registry: Any = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        application: Any = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            match environ["PATH_INFO"]:
                case "/livez":
                    return _verdict(self._health.not_live, start_response)
                case "/readyz":
                    return _verdict(self._health.not_ready, start_response)
            # In OpenMetrics the library takes the colon out of names that are not its own.
            return application({**environ, "HTTP_ACCEPT": _PLAIN}, start_response)

        try:
            self._server = make_server(self._host, self._port, answer)
        except OSError as fault:
            place = f"{self._host}:{self._port}"
            raise SettingsError([f"metrics_port: cannot listen at {place}: {fault}"]) from fault
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Listen no more; idempotent."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(_STOP_S)


def _verdict(reason: str, start_response: Any) -> list[bytes]:
    """The answer to a probe: status 200, or 503 with the reason."""
    status = "503 Service Unavailable" if reason else "200 OK"
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{reason or 'ok'}\n".encode()]
