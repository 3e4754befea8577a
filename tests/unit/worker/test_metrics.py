"""How a controller adds up the metrics of its processes."""

from __future__ import annotations

from worker.host.metrics import EngineMetrics
from worker.messages import EngineMetric, EngineStats, PublishedCounts


def measured(count: float) -> EngineStats:
    labels = (("model_name", "/a/path"),)
    total = EngineMetric("vllm:steps", "counter", "Steps.", [("vllm:steps_total", labels, count)])
    running = EngineMetric("vllm:running", "gauge", "Runs.", [("vllm:running", labels, count)])
    return EngineStats(1, [total, running])


def test_counters_of_a_new_engine_continue_those_of_the_last() -> None:
    def shown() -> dict[str, list[tuple[dict[str, str], float]]]:
        found = {one.name: one.samples for one in engines.collect()}
        return {name: [(one.labels, one.value) for one in each] for name, each in found.items()}

    # Given the last report of an engine
    engines = EngineMetrics()
    engines.hear("w", "small", measured(5))
    engines.hear("w", "small", measured(7))
    labels = {"model_name": "small", "worker": "w"}
    assert shown() == {"vllm:steps": [(labels, 7)], "vllm:running": [(labels, 7)]}

    # If its process ends, I expect its counters to stay,
    engines.hear("w", "", None)
    assert shown() == {"vllm:steps": [(labels, 7)], "vllm:running": []}
    # and its successor to continue them, in a process of its own or not.
    engines.hear("w", "small", measured(9))
    assert shown()["vllm:steps"] == [(labels, 16)]
    engines.hear("w", "small", EngineStats(2, measured(1).metrics))
    assert shown()["vllm:steps"] == [(labels, 17)]
    assert shown()["vllm:running"] == [(labels, 1)]


def test_sums_do_not_change_their_parts() -> None:
    part, whole = PublishedCounts(), PublishedCounts()
    part.results["m", "high", "failed"] = 1
    part.ttft["m"].observe(0.3)
    whole.add(part)
    whole.add(part)

    assert whole.results["m", "high", "failed"] == 2
    assert (sum(whole.ttft["m"].counts), whole.ttft["m"].sum_s) == (2, 0.6)
    assert sum(part.copy().ttft["m"].counts) == 1
