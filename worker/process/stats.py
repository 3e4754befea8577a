"""What a worker has made and published: counted as it goes, and reported with each heartbeat.

Counted twice: per incarnation for the roster, and per process for the metrics.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from tokenyard import clock
from tokenyard.protocol.keys import split_intake
from tokenyard.protocol.media import modalities_of
from tokenyard.protocol.wire import Request
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.telemetry.metrics import Histogram, trimmed
from tokenyard.telemetry.tracing import Attributes, Tracer, carrier_of
from worker.engines import EngineInfo, Finished, RequestError, TokenDelta
from worker.messages import EngineMetric, PublishedCounts
from worker.process.outcomes import End, Expired, Outcome, Remembered, Run, output_tokens

#: The median time to first token covers this window and at most `MOST_KEPT` requests.
WINDOW_S: Final = 60.0
MOST_KEPT: Final = 1000
_OUTCOMES: Final = {
    Finished: "completed",
    RequestError: "failed",
    Expired: "expired",
    Remembered: "completed",
}
_FAILURES: Final = (RequestError, Expired)


class RunningStats:
    """The counters of a worker process; thread-safe."""

    def __init__(self, *, has_readers: bool = True) -> None:
        """Without ``has_readers`` only the roster's numbers are counted."""
        self._has_readers = has_readers
        self.error = ""  # the engine's last error
        self._lock = threading.Lock()
        self._counts = PublishedCounts()
        self.begin()

    def begin(self, model: str = "") -> None:
        """Reset the roster's counters for a new incarnation, which serves this base model."""
        with self._lock:
            self._model = model
            self._finished = 0
            self._failed = 0
            self._tokens = 0
            self._ttft = Histogram()
            self._firsts: deque[tuple[float, float]] = deque(maxlen=MOST_KEPT)  # monotonic, ms

    def note(self, published: Iterable[tuple[Run, Outcome]]) -> None:
        """Count outcomes that were just published."""
        tokens, now = 0, clock.monotonic()
        with self._lock:
            for run, outcome in published:
                if isinstance(outcome, TokenDelta):
                    tokens += len(outcome.tokens)
                    continue
                self._finished += 1
                self._failed += isinstance(outcome, _FAILURES)
                made = output_tokens(outcome)
                tokens += max(0, made - max(run.seq, run.counted))
                if _came_at_once(run, outcome):
                    self._ttft.observe(_whole_s(run, now))
                if self._has_readers:
                    self._note_end(run, outcome, made, now)
            self._count(tokens)

    def note_made(self, made: Iterable[tuple[Run, int]]) -> None:
        """Count what was made so far of answers that are published whole."""
        with self._lock:
            for run, tokens in made:
                self._count(max(0, tokens - run.counted))
                run.counted = max(run.counted, tokens)

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
        self._counts.tokens[self._model, "output"] += tokens

    def _note_end(self, run: Run, end: End, made: int, now: float) -> None:
        counts, model, assignment = self._counts, self._model, run.assignment
        whole_s = _whole_s(run, now)
        priority, _ = split_intake(assignment.sid.partition("/")[0])
        counts.results[model, priority, _OUTCOMES[type(end)]] += 1
        counts.e2e[model].observe(whole_s)
        if not isinstance(end, Finished):
            return
        counts.tokens[model, "input"] += end.prompt_tokens
        request = assignment.request
        counts.inputs[model, request.task] += len(request.inputs) if request.inputs else 1
        for modality, count in modalities_of(request).items():
            counts.media[model, modality] += count
        if run.first_token is not None:
            if made > 1:
                counts.tpot[model].observe((now - run.first_token) / (made - 1))
        elif _came_at_once(run, end):
            counts.ttft[model].observe(whole_s)

    def note_first(self, run: Run, now: float) -> None:
        """Note the first token of a request; ``now`` is monotonic."""
        waited_ms = run.waited_ms + (now - run.began) * 1000
        with self._lock:
            self._firsts.append((now, waited_ms))
            self._ttft.observe(waited_ms / 1000)
            self._counts.ttft[self._model].observe(waited_ms / 1000)

    def note_stale(self, count: int) -> None:
        """Count publications that the fence refused."""
        with self._lock:
            self._counts.stale += count

    def note_fault(self) -> None:
        """Count a request that was handed back because the engine could not serve it."""
        with self._lock:
            self._counts.faults += 1

    def now(self) -> WorkerTotals:
        """The counters of the current incarnation."""
        with self._lock:
            since = clock.monotonic() - WINDOW_S
            while self._firsts and self._firsts[0][0] < since:
                self._firsts.popleft()
            waited = [ms for _, ms in self._firsts]
            median = round(statistics.median(waited), 1) if waited else None
            return WorkerTotals(
                finished=self._finished,
                failed=self._failed,
                tokens=self._tokens,
                ttft_ms=median,
                ttft=trimmed(self._ttft.counts),
            )

    def counts(self) -> PublishedCounts:
        """The counters of this process."""
        with self._lock:
            return self._counts.copy()


def _whole_s(run: Run, now: float) -> float:
    """Time from acceptance to the end of a request; ``now`` is monotonic."""
    return run.waited_ms / 1000 + now - run.began


def _came_at_once(run: Run, end: End) -> bool:
    """Whether all tokens of a stream came with its result."""
    assignment = run.assignment
    is_whole = assignment.request.stream and run.first_token is None
    return is_whole and isinstance(end, Finished) and not assignment.published


def read_stats() -> Sequence[EngineMetric]:
    """VLLM's own metrics in this process; empty before its first engine with log stats.

    An `LLMEngine` keeps them in the default registry of `prometheus_client`, where each engine
    registers them again. Thread-safe.
    """
    library = sys.modules.get("prometheus_client")
    if library is None:
        return ()
    return [
        EngineMetric(
            family.name,
            family.type,
            family.documentation,
            [
                (one.name, tuple(sorted(one.labels.items())), one.value)
                for one in family.samples
                if not one.name.endswith("_created")  # start times, not measurements
            ],
        )
        for family in library.REGISTRY.collect()
        if family.name.startswith("vllm:")
    ]


# The span of each attempt at a request, by OpenTelemetry's GenAI conventions.


class EngineSpans:
    """Records ended attempts; does nothing while tracing is off."""

    def __init__(self, tracer: Tracer, info: EngineInfo, worker: str) -> None:
        self._tracer = tracer
        self._info = info
        self._worker = worker

    def ended(self, run: Run, end: End | None) -> None:
        """Record an attempt; ``end`` is None if the request now belongs to another attempt."""
        if not self._tracer.is_on:
            return
        carrier = carrier_of(run.assignment.request.metadata)
        if not carrier:
            return
        now, now_s = clock.monotonic(), clock.wall()
        operation = _operation(run.assignment.request)
        first = {} if run.first_token is None else {"first token": now_s - now + run.first_token}
        self._tracer.span(
            f"{operation} {self._info.model}",
            carrier,
            now_s - now + run.began,
            now_s,
            {"gen_ai.operation.name": operation, **self._attributes(run), **_made(end)},
            is_consumer=True,
            events=first,
            error=_error(end),
        )

    def _attributes(self, run: Run) -> Attributes:
        request, params = run.assignment.request, run.assignment.request.params
        found: dict[str, str | bool | int | float | Sequence[str]] = {
            "gen_ai.provider.name": self._info.engine,
            "gen_ai.request.model": request.model or self._info.model,
            "gen_ai.response.model": self._info.model,
            "gen_ai.response.id": request.id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "tokenyard.worker": self._worker,
            "tokenyard.attempt": run.assignment.attempt,
            "tokenyard.queue_seconds": run.waited_ms / 1000,
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        if run.first_token is not None:
            found["gen_ai.server.time_to_first_token"] = run.first_token - run.began
        return found


def _operation(request: Request) -> str:
    """What a request asks for; of tasks that pool, the conventions name only embeddings."""
    if request.pools:
        return "embeddings" if request.task == "embed" else request.task
    return "chat" if request.messages else "text_completion"


def _made(end: End | None) -> Attributes:
    made = end.made if isinstance(end, Expired) else end
    if not isinstance(made, Finished):
        return {}
    return {
        "gen_ai.usage.input_tokens": made.prompt_tokens,
        "gen_ai.usage.output_tokens": made.output_tokens,
        "gen_ai.response.finish_reasons": [one.finish_reason or "" for one in made.choices],
    }


def _error(end: End | None) -> str:
    match end:
        case Finished() | Remembered():
            return ""
        case RequestError(_, code, message):
            return f"{code}: {message}"
        case Expired(_, _, where):
            return f"DEADLINE_EXCEEDED: the deadline passed while the request was {where}"
        case None:
            return "the request is another attempt's"
