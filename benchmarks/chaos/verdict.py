"""Judges whether a chaos run tried enough.

A run that breaks nothing finds nothing, and must not pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from benchmarks.chaos.check import History, Story
from benchmarks.chaos.faults import FIRST, Kind, Part, Planned
from benchmarks.chaos.recovery import recoveries, tenants_hit

#: Share of the schedule that may find no target, because its targets were restarting.
MOST_MISSED: Final = 0.1
#: Seconds in which a run has time for all of `FIRST`.
FULL_S: Final = 60.0


def shortcomings(
    planned: Sequence[Planned],
    history: History,
    seconds: float,
    parts: Collection[Part] = (),
    tenants: Collection[str] = (),
) -> Iterator[str]:
    """What a run did not try, in words; empty if its figures are meaningful.

    ``seconds`` and ``parts`` are those of `schedule`, ``tenants`` those of the load.
    """
    if not any(story.is_accepted for story in history.stories.values()):
        yield "no request was accepted"
    if not history.faults:
        yield f"none of {len(planned)} planned faults hit anything"
    yield from _missed(planned, history)
    hit = {fault.kind for fault in history.faults}
    for kind in map(" ".join, _due(seconds, parts)):
        if kind not in hit:
            yield f"no {kind} hit anything"
        elif kind == "worker kill" and not recoveries(history, kind):
            yield "no recovery was measured: no killed worker had a stream under way"
        elif kind == "gateway kill" and not any(one.resumed for one in history.stories.values()):
            yield "no stream over HTTP was continued: no killed gateway had one under way"
    if tenants and "worker kill" in hit and not tenants_hit(history):
        yield "no killed worker had a request of a tenant"
    if (
        tenants
        and "gateway" in parts
        and not any(map(_is_of_tenant_over_http, history.stories.values()))
    ):
        yield "no tenant's request came over HTTP"


def _is_of_tenant_over_http(story: Story) -> bool:
    return story.is_of_tenant and story.is_over_http and bool(story.results)


def _missed(planned: Sequence[Planned], history: History) -> Iterator[str]:
    missed = Counter(one.kind for one in history.missed)
    if missed.total() > MOST_MISSED * len(planned):
        kinds = ", ".join(f"{count} {kind}" for kind, count in missed.most_common())
        yield f"{missed.total()} of {len(planned)} faults had no target ({kinds})"


def _due(seconds: float, parts: Collection[Part]) -> Sequence[Kind]:
    """The kinds that must have hit a target; a short run has time only for two kills."""
    due = FIRST if seconds >= FULL_S else FIRST[:2]
    return [kind for kind in due if not parts or kind[0] in parts]
