"""The span of each attempt at a request, by OpenTelemetry's GenAI conventions."""

from __future__ import annotations

from collections.abc import Sequence

from tokenyard import clock
from tokenyard.protocol.wire import Request
from tokenyard.telemetry.tracing import Attributes, Tracer, carrier_of
from worker.engines import EngineInfo, Finished, RequestError
from worker.process.outcomes import End, Expired, Remembered, Run


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
