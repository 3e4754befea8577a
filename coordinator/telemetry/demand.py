"""The leader's statement of what waits and runs, by model (`tokenyard.protocol.leader_reports`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

from coordinator.roster import Roster
from tokenyard.protocol.leader_reports import FIELD, ModelDemand, YardDemand
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts
from tokenyard.telemetry.intake_ages import depths_of, queue_depths

#: Requests that a worker takes at once, for a model of which no worker has said its lane's limit.
USUAL_LANE: Final = 64


def publish_demand(
    scripts: Scripts, token: str, waiting: Mapping[str, int], roster: Roster
) -> None:
    """Say how many requests wait, ``waiting`` of them for each model, as far as is known."""
    known = Counter(waiting)
    known[""] += max(0, _count_waiting(scripts.yard) - known.total())
    demand = YardDemand(round(roster.broker_time.now_ms), demand_of(+known, roster))
    scripts.take_over(token, {FIELD: msgspec.json.encode(demand)})


def _count_waiting(yard: Yard) -> int:
    """All requests that wait: in the common intakes, and in those of tenants."""
    pipeline = yard.connection.pipeline(transaction=False)
    queue_depths(pipeline, yard.keys)
    return sum(depths_of(pipeline.execute()).values())


def demand_of(waiting: Mapping[str, int], roster: Roster) -> dict[str, ModelDemand]:
    """What waits, runs and is pinned, by model."""
    running: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    limits: Counter[str] = Counter()
    for member in roster.members.values():
        model = member.info.model
        running[model] += member.load
        busy[model] += bool(member.load and member.has_lease)
        limits[model] = max(limits[model], member.info.lane_limit)
    pins: Counter[str] = Counter()
    for host in (*roster.gone, *roster.hosts.values()):
        for info in host.models:
            pins[info.name] = max(pins[info.name], info.pin)
    demand = {}
    for model in sorted({*waiting, *(+running), *(+pins)}):
        waits, runs = waiting.get(model, 0), running[model]
        for_requests = -(-(waits + runs) // (limits[model] or USUAL_LANE))
        workers = max(for_requests, busy[model], pins[model])
        demand[model] = ModelDemand(waits, runs, workers)
    return demand
