"""The life of a request as a bar: what it waited and ran, in proportion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tokenyard.yard.timeline import Attempt, Timeline

Phase = Literal["waiting", "lane", "prompt", "answer", "lost"]
#: Width of the whole bar.
WIDTH: Final = 1000
#: Parts are drawn at least so wide, so that each can be seen.
_LEAST: Final = 4
PHASES: Final[dict[Phase, str]] = {
    "waiting": "waiting in the queue",
    "lane": "on its worker, not running yet",
    "prompt": "reading the prompt",
    "answer": "running",
    "lost": "an attempt that was taken back",
}


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part of the bar."""

    phase: Phase
    name: str
    took_ms: int
    x: int
    width: int


def bar_of(timeline: Timeline) -> list[BarPart]:
    """The parts, from acceptance to the end or to now; none where it never arrived."""
    spans = [one for one in _spans(timeline) if one[2] >= 0]
    total = sum(took_ms for *_, took_ms in spans)
    if not spans or total <= 0:
        return []
    widths = [max(_LEAST, took_ms * WIDTH // total) for *_, took_ms in spans]
    parts, x = [], 0.0
    for (phase, name, took_ms), width in zip(spans, widths, strict=True):
        scaled = width * WIDTH / sum(widths)
        parts.append(BarPart(phase, name, took_ms, round(x), round(x + scaled) - round(x)))
        x += scaled
    return parts


def _spans(timeline: Timeline) -> Iterator[tuple[Phase, str, int]]:
    if timeline.accepted_ms is None:
        return
    end_ms = timeline.ended_ms or timeline.now_ms
    since_ms = timeline.accepted_ms
    for attempt in timeline.attempts:
        yield "waiting", _waits(attempt.number), attempt.assigned_ms - since_ms
        if attempt.given_back_ms is not None:
            name = f"attempt {attempt.number} on {attempt.worker}, taken back"
            yield "lost", name, attempt.given_back_ms - attempt.assigned_ms
            since_ms = attempt.given_back_ms
        else:
            yield from _last(timeline, attempt, end_ms)
            return
    yield "waiting", _waits(len(timeline.attempts) + 1), end_ms - since_ms


def _waits(number: int) -> str:
    return "waiting" if number == 1 else f"waiting for attempt {number}"


def _last(timeline: Timeline, attempt: Attempt, end_ms: int) -> Iterator[tuple[Phase, str, int]]:
    """The attempt that runs, or that ended with the request."""
    name = f"attempt {attempt.number} on {attempt.worker}"
    timing = timeline.result.timing if timeline.result else None
    started_ms = timeline.started_ms
    if started_ms is None or timing is None or started_ms < attempt.assigned_ms:
        yield "answer", name, end_ms - attempt.assigned_ms
        return
    first_ms = started_ms + int(timing.first_token_ms or 0)
    yield "lane", f"{name}, not running yet", started_ms - attempt.assigned_ms
    yield "prompt", f"{name}, to the first token", first_ms - started_ms
    yield "answer", f"{name}, to the end", end_ms - first_ms


def phases_of(parts: Sequence[BarPart]) -> list[tuple[Phase, str]]:
    """The phases in a bar, for its legend."""
    seen = {part.phase for part in parts}
    return [(phase, name) for phase, name in PHASES.items() if phase in seen]
