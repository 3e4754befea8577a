"""What a load generator has measured."""

from __future__ import annotations

import pytest

from tokenyard.cli.bench.measures import BenchResult, Sample, percentile

RUN = BenchResult(
    [
        Sample(10, 5, latency_s=0.5, ttft_s=0.1),
        Sample(10, 5, latency_s=1.5, ttft_s=0.3),
        Sample(10, 1, latency_s=1.0, ttft_s=0.2),
        Sample(error="QUEUE_FULL"),
    ],
    duration_s=2.0,
)


def test_bench_result_has_throughput_and_times() -> None:
    result = RUN.as_dict()

    assert (result["completed"], result["failed"]) == (3, 1)
    assert result["errors"] == {"QUEUE_FULL": 1}
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 11)
    assert result["request_throughput"] == 1.5
    assert result["output_throughput"] == 5.5
    assert result["total_token_throughput"] == 20.5
    assert (result["mean_ttft_ms"], result["p50_ttft_ms"]) == (200.0, 200.0)
    assert result["p90_e2el_ms"] == 1400.0
    # I expect that one token alone has no time between tokens
    assert result["mean_tpot_ms"] == 200.0


def test_bench_result_omits_what_was_not_measured() -> None:
    result = BenchResult([Sample(3, 4, latency_s=1.0)], 1.0).as_dict()

    assert "mean_e2el_ms" in result
    assert not any("ttft" in key or "tpot" in key for key in result)


def test_the_table_has_the_words_of_vllm() -> None:
    text = RUN.as_text()

    for words in (
        " Serving Benchmark Result ",
        "Successful requests:                     3",
        "Failed requests:                         1",
        "  QUEUE_FULL:                            1",
        "Output token throughput (tok/s):         5.50",
        "---Time to First Token---",
        "P99 TTFT (ms):",
        "Mean E2EL (ms):                          1000.00",
    ):
        assert words in text, words


def test_a_run_without_requests_has_no_throughput() -> None:
    empty = BenchResult([], 0.0)

    assert empty.as_dict()["request_throughput"] == 0.0
    assert "Successful requests:                     0" in empty.as_text()


@pytest.mark.parametrize(("part", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentiles_lie_on_a_line_between_two_values(part: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], part) == pytest.approx(value)
    assert percentile([7.0], part) == 7.0
