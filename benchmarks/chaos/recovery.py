"""Measures how soon the streams of a killed worker continue on another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.chaos.check import History, Story
from benchmarks.chaos.history import Fault

_LANE: Final = "lane:"


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


def tenants_hit(history: History) -> set[str]:
    """The tenants with a request on the lane of a worker that was killed."""
    found: set[str] = set()
    for fault in history.faults:
        if fault.kind.endswith((" kill", " crash")):
            workers = {one for pid in fault.pids for one in history.workers.get(pid, ())}
            stories = history.stories.values()
            hit = [story.asked for story in stories if _runs_on(story, fault.at, workers)]
            found.update(asked.tenant for asked in hit if asked and asked.tenant)
    return found


def _runs_on(story: Story, at: float, workers: Collection[str]) -> bool:
    """Whether a request is on the lane of one of these workers, unfinished."""
    lanes = [one.place for one in story.moved if one.place.startswith(_LANE) and one.at <= at]
    if not lanes or lanes[-1].removeprefix(_LANE) not in workers:
        return False
    return all(one.at > at for one in story.results)


def _streams(story: Story) -> bool:
    return story.asked is not None and story.asked.stream


def _recovery(story: Story, killed: float, workers: set[str]) -> Iterator[float]:
    """Seconds from the kill to the first token of the next attempt, if there is one."""
    after = [one.at for one in story.moved if one.place.startswith(_LANE) and one.at > killed]
    if not after or not _runs_on(story, killed, workers):
        return
    if not any(one.at <= killed for one in story.published):
        return  # had not started: its waiting time is unknown
    following = [one.at for one in story.published if one.at >= after[0]]
    if following:
        yield following[0] - killed
