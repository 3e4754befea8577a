"""How the broker benchmark evaluates its times."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from benchmarks.broker import MEASURES, Plan, Round, summary
from benchmarks.measure import Latencies, Throughput, flowing

PARTS = ("client", "coordinator", "workers", "broker")


def measured(per_s: float, one_ms: float, half_ms: float) -> Round:
    throughput = Throughput(1000, 1000 / per_s, dict.fromkeys(PARTS, 0.1))
    return Round(throughput, Latencies([one_ms] * 9), Latencies([half_ms] * 9))


class TestFlow:
    def test_every_request_is_sent_once_in_order_and_timed(self) -> None:
        # Given answers in another order
        sent: list[int] = []
        answers: SimpleQueue[list[int]] = SimpleQueue()

        def send(batch: range) -> None:
            sent.extend(batch)
            answers.put(list(reversed(batch)))

        latencies = flowing(50, 5_000.0, send, lambda: answers.get(timeout=30.0))

        assert sent == list(range(50))
        assert len(latencies.all_ms) == 50
        assert min(latencies.all_ms) >= 0.0

    def test_a_fault_while_listening_ends_the_flow(self) -> None:
        def fail() -> list[int]:
            raise TimeoutError("no reply")

        with pytest.raises(TimeoutError, match="no reply"):
            flowing(10**6, 5_000.0, lambda batch: None, fail)

    def test_the_flow_takes_as_long_as_the_paced_part(self) -> None:
        assert Plan(requests=1, paced_requests=500).flow(2_000.0) == 10_000
        assert Plan(requests=1, paced_requests=500).flow(20.0) == 500


def test_ratios_compare_neighbouring_rounds() -> None:
    # Given three rounds, with a slow machine during the last
    ours = [measured(100.0, 3.0, 6.0), measured(120.0, 3.2, 6.2), measured(10.0, 40.0, 90.0)]
    theirs = [measured(200.0, 2.0, 3.0), measured(240.0, 1.6, 3.1), measured(20.0, 20.0, 45.0)]

    figures = summary(ours, theirs)

    assert figures["requests_per_s"] == 100.0
    assert figures["half_rate"] == 50.0
    assert (figures["p50_ms"], figures["raw_p50_ms"]) == (3.2, 2.0)
    assert (figures["ratio_to_raw"], figures["p50_ms_to_raw"]) == (0.5, 2.0)
    assert figures["half_p99_ms_to_raw"] == 2.0
    assert {f"raw_{name}" for name in MEASURES} <= figures.keys()
    assert figures["cpu_us_broker"] == 100.0
