"""Measures how soon the streams of a killed worker continue on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.chaos.check import History, Story
from benchmarks.chaos.history import Fault


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill of a busy worker: seconds to the next token of each of its streams."""

    fault: Fault
    seconds: Sequence[float]


def recoveries(history: History, kind: str) -> list[Recovery]:
    """The recoveries from faults of a kind, such as ``worker kill``, that hit running streams."""
    found = []
    for fault in history.faults:
        if fault.kind != kind:
            continue
        pids = [*fault.pids, *fault.orphans]
        workers = {worker for pid in pids for worker in history.workers.get(pid, ())}
        streams = [story for story in history.stories.values() if _streams(story)]
        seconds = [one for story in streams for one in _recovery(story, fault.at, workers)]
        if seconds:
            found.append(Recovery(fault, seconds))
    return found


def _streams(story: Story) -> bool:
    return story.asked is not None and story.asked.stream


def _recovery(story: Story, killed: float, workers: set[str]) -> Iterator[float]:
    """Seconds from the kill to the first token of the next attempt, if there is one."""
    moves = [(one.at, one.place) for one in story.moved if one.place.startswith("lane:")]
    before = [place for at, place in moves if at <= killed]
    after = [at for at, place in moves if at > killed]
    if not before or not after or before[-1].removeprefix("lane:") not in workers:
        return
    if any(one.at <= killed for one in story.results):
        return
    if not any(one.at <= killed for one in story.published):
        return  # had not started: its waiting time is unknown
    following = [one.at for one in story.published if one.at >= after[0]]
    if following:
        yield following[0] - killed
