"""The measurements of a load, in the terms of `vllm bench serve`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

PERCENTILES: Final = (50, 90, 99)
#: Name in vLLM's results: short name, and header of its section.
_TIMES: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, as seen by its client; times in seconds."""

    input_tokens: int = 0
    output_tokens: int = 0
    latency_s: float = 0.0  # from submission to result
    ttft_s: float | None = None  # None: not streamed
    error: str = ""  # error code, "" if it completed


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The samples of a run."""

    samples: Sequence[Sample]
    duration_s: float

    @property
    def completed(self) -> list[Sample]:
        """The completed requests; only these count."""
        return [sample for sample in self.samples if not sample.error]

    @property
    def errors(self) -> dict[str, int]:
        """Failed requests by error code."""
        return dict(Counter(sample.error for sample in self.samples if sample.error).most_common())

    def as_dict(self) -> dict[str, Any]:
        """The result with vLLM's keys; what was not measured is left out."""
        done = self.completed
        duration_s = max(self.duration_s, 1e-9)
        inputs = sum(sample.input_tokens for sample in done)
        outputs = sum(sample.output_tokens for sample in done)
        result: dict[str, Any] = {
            "duration": round(self.duration_s, 3),
            "completed": len(done),
            "failed": len(self.samples) - len(done),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": round(len(done) / duration_s, 3),
            "output_throughput": round(outputs / duration_s, 3),
            "total_token_throughput": round((inputs + outputs) / duration_s, 3),
            "errors": self.errors,
        }
        for name, values in self._times_ms():
            result |= _statistics(name, values)
        return result

    def _times_ms(self) -> Iterator[tuple[str, list[float]]]:
        done = self.completed
        yield "ttft", [1000 * one.ttft_s for one in done if one.ttft_s is not None]
        yield "tpot", [1000 * _tpot_s(one) for one in done if one.ttft_s and one.output_tokens > 1]
        yield "e2el", [1000 * one.latency_s for one in done]

    def as_text(self) -> str:
        """The table that vLLM prints."""
        result = self.as_dict()
        lines = [
            f"{' Serving Benchmark Result ':=^50}",
            _line("Successful requests:", result["completed"]),
            _line("Failed requests:", result["failed"]),
            *(_line(f"  {code}:", count) for code, count in self.errors.items()),
            _line("Benchmark duration (s):", result["duration"]),
            _line("Total input tokens:", result["total_input_tokens"]),
            _line("Total generated tokens:", result["total_output_tokens"]),
            _line("Request throughput (req/s):", result["request_throughput"]),
            _line("Output token throughput (tok/s):", result["output_throughput"]),
            _line("Total token throughput (tok/s):", result["total_token_throughput"]),
        ]
        for name, (short, header) in _TIMES.items():
            if f"mean_{name}_ms" in result:
                lines.append(f"{header:-^50}")
                lines.append(_line(f"Mean {short} (ms):", result[f"mean_{name}_ms"]))
                lines += [
                    _line(f"P{part} {short} (ms):", result[f"p{part}_{name}_ms"])
                    for part in PERCENTILES
                ]
        return "\n".join([*lines, "=" * 50])


def _tpot_s(sample: Sample) -> float:
    return (sample.latency_s - (sample.ttft_s or 0.0)) / (sample.output_tokens - 1)


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    found = {f"mean_{name}_ms": statistics.fmean(ordered)}
    found |= {f"p{part}_{name}_ms": percentile(ordered, part) for part in PERCENTILES}
    return {key: round(value, 3) for key, value in found.items()}


def percentile(ordered: Sequence[float], part: float) -> float:
    """A percentile of ascending values, interpolated linearly as in numpy."""
    place = (len(ordered) - 1) * part / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _line(name: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()
