"""Does a tenant that floods a yard make others wait, and do all have the shares of their weights?

Each policy gets the same loads on simulated workers with a speed model: tenants that ask once a
second, alone and beside one that floods; and three that always wait, with weights 1, 2 and 4.
Every answer is checked. The exit status is not 0 where an answer was wrong, an order of service was
not seen that a policy must have, or a target is missed (with --quick, targets do not count).

    python -m benchmarks.fairness [--counts 2,10,50] [--policies vtc,tenants] [--seconds 60]
        [--flood-s 30] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import secrets
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, get_args

import click

from benchmarks.fairness.figures import (
    Sample,
    Window,
    in_engines,
    largest_difference,
    light_ratio,
    missed,
    overtakers,
    percentile,
    service,
    share_error,
    shares,
    tokens_per_s,
    waits_ms,
    wrong_answers,
)
from benchmarks.fairness.loads import (
    FLOODING,
    Speed,
    Tenant,
    flooding_tenant,
    greedy_tenants,
    light_tenants,
)
from benchmarks.fairness.run import Phases, Policy, open_load, set_weights
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import publish, save, tell
from benchmarks.yard import ServingYard, embedded_broker, end_in_order, simulated_yard
from tokenyard.process.embedded_broker import EmbeddedBroker

POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
#: Per worker of a flood: a prompt of 300 tokens takes 15 ms, a token of each answer 40 ms.
SPEED: Final = Speed(workers=2, max_num_seqs=32, prefill_rate=20_000.0, step_s=0.04)
#: Where all wait: the tenant of the least weight has had many requests in a minute.
GREED_SPEED: Final = Speed(workers=2, max_num_seqs=80, prefill_rate=40_000.0, step_s=0.03)
_QUICK_SPEED: Final = Speed(workers=2, max_num_seqs=4, prefill_rate=20_000.0, step_s=0.01)
#: What the flooding tenant asks for, by the capacity, and each of those that always wait.
_FLOOD: Final = 10.0
_GREED: Final = 1.5
#: Policies that know weights, and the deviation from a due share that even a short run has not.
WEIGHTED: Final[frozenset[Policy]] = frozenset({"vtc", "tenants"})
_COARSE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a measurement."""

    speed: Speed
    greed_speed: Speed
    counts: Sequence[int]  # of tenants of a flood, with the one that floods
    policies: Sequence[Policy]
    flood: Phases
    greed: Phases


@dataclass(frozen=True, slots=True)
class Flood:
    """Tenants that ask once a second, alone and beside a flood."""

    alone_p50_ms: float
    alone_p99_ms: float
    p50_ms: float
    p99_ms: float
    unanswered: int  # of the requests of light tenants
    service_ms: float  # mean time in the engine of those beside the flood, and of the flood's
    tokens_per_s: float
    in_engines: float  # requests, on average
    out_of_turn: int  # light requests answered before an older one of the flood
    wrong: int

    @property
    def ratio(self) -> float:
        """The wait, by the largest that is wanted."""
        return light_ratio(self.p99_ms, self.alone_p99_ms, self.service_ms)


@dataclass(frozen=True, slots=True)
class Greed:
    """Tenants of weights 1, 2 and 4 that always wait."""

    of_due: Mapping[str, float]  # what each had, by what its weight gives it
    share_error: float
    largest_difference: float
    tokens_per_s: float
    in_engines: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All figures, by policy; those of floods also by the number of tenants."""

    floods: Mapping[Policy, Mapping[int, Flood]]
    greed: Mapping[Policy, Greed]


def measure(plan: Plan) -> Measured:
    """Measure all policies in turn on each load, each on a yard of its own."""
    floods: dict[Policy, dict[int, Flood]] = {policy: {} for policy in plan.policies}
    greed: dict[Policy, Greed] = {}
    with embedded_broker() as broker:
        for policy in plan.policies:
            tenants = greedy_tenants(plan.greed_speed, _GREED, seed=1)
            [samples] = _run(broker, plan.greed_speed, policy, plan.greed, [tenants])
            greed[policy] = greed_of(samples, tenants, plan.greed.window)
            tell(f"{policy}, all wait: {greed[policy]}")
            save(figures(Measured(floods, greed)))
        for count in plan.counts:
            light = light_tenants(count - 1, seed=2)
            all_of_them = [flooding_tenant(plan.speed, _FLOOD, seed=3), *light]
            for policy in plan.policies:
                alone, flood = _run(broker, plan.speed, policy, plan.flood, [light, all_of_them])
                floods[policy][count] = flood_of(alone, flood, plan.flood)
                tell(f"{policy}, {count} tenants: {floods[policy][count]}")
                save(figures(Measured(floods, greed)))
    return Measured(floods, greed)


def _run(
    broker: EmbeddedBroker,
    speed: Speed,
    policy: Policy,
    phases: Phases,
    loads: Sequence[Sequence[Tenant]],
) -> list[list[Sample]]:
    """Run loads one after the other on a new yard."""
    coordinator = ("--max-num-queued-reqs", "10000000", "--max-num-queued-tokens", "10000000000")
    worker = (
        *("--simulated-prefill-rate", str(speed.prefill_rate)),
        *("--simulated-step-s", str(speed.step_s)),
    )
    name = f"fairness-{secrets.token_hex(4)}"
    with simulated_yard(
        broker, name, speed.workers, speed.max_num_seqs, coordinator, worker
    ) as yard:
        if policy == "tenants":
            set_weights(yard, itertools.chain(*loads))
        gc.collect()
        return asyncio.run(_run_all(yard, policy, speed, phases, loads))


async def _run_all(
    yard: ServingYard,
    policy: Policy,
    speed: Speed,
    phases: Phases,
    loads: Sequence[Sequence[Tenant]],
) -> list[list[Sample]]:
    async with open_load(yard, policy, speed) as load:
        return [await load.run(tenants, phases) for tenants in loads]


def flood_of(alone: Sequence[Sample], flood: Sequence[Sample], phases: Phases) -> Flood:
    """The figures of a flood, and of the same light tenants without it."""
    window, end_s = phases.window, phases.all_s
    others = [one for one in flood if one.tenant != FLOODING]
    before, beside = waits_ms(alone, window, end_s), waits_ms(others, window, end_s)
    return Flood(
        alone_p50_ms=percentile(before, 50),
        alone_p99_ms=percentile(before, 99),
        p50_ms=percentile(beside, 50),
        p99_ms=percentile(beside, 99),
        unanswered=sum(not one.is_answered for one in others if window.has(one)),
        service_ms=1000 * statistics.fmean(one.engine_s for one in flood if one.is_answered),
        tokens_per_s=tokens_per_s(flood, window),
        in_engines=in_engines(flood, window),
        out_of_turn=overtakers(flood),
        wrong=wrong_answers([*alone, *flood]),
    )


def greed_of(samples: Sequence[Sample], tenants: Sequence[Tenant], window: Window) -> Greed:
    """The figures of tenants that always wait."""
    weights = {tenant.name: tenant.weight for tenant in tenants}
    of_due = shares(service(samples, window), weights)
    return Greed(
        of_due,
        share_error(of_due),
        largest_difference(samples, window, weights),
        tokens_per_s(samples, window),
        in_engines(samples, window),
        wrong_answers(samples),
    )


def figures(measured: Measured) -> dict[str, Any]:
    """The figures with targets, and all that they derive from."""
    return {
        **targets(measured),
        "floods": {
            policy: {str(count): {**asdict(one), "ratio": one.ratio} for count, one in runs.items()}
            for policy, runs in measured.floods.items()
        },
        "greed": {policy: asdict(one) for policy, one in measured.greed.items()},
    }


def targets(measured: Measured) -> dict[str, float]:
    """The figures with targets, where they were measured: those of the yard's own tenants."""
    found: dict[str, float] = {}
    mine, today = (measured.floods.get(policy) for policy in ("tenants", "fifo"))
    if mine:
        found["light_p99_ratio"] = max(one.ratio for one in mine.values())
    if own := measured.greed.get("tenants"):
        found["share_error"] = own.share_error
    if mine and today and mine.keys() == today.keys():
        fast, slow = (sum(one.tokens_per_s for one in runs.values()) for runs in (mine, today))
        found["throughput_ratio"] = fast / slow
    return found


def faults(measured: Measured) -> Iterator[str]:
    """What is wrong at any speed."""
    runs: list[Flood | Greed] = list(measured.greed.values())
    for policy, floods in measured.floods.items():
        runs += floods.values()
        for count, one in floods.items():
            if policy != "fifo" and not one.out_of_turn:
                yield f"{policy}, {count} tenants: nobody was served before the flood"
    if wrong := sum(one.wrong for one in runs):
        yield f"{wrong} answers were wrong"
    for policy in WEIGHTED & measured.greed.keys():
        if (error := measured.greed[policy].share_error) > _COARSE:
            yield f"{policy}: a share differs from its due by {error:.0%}"


def show(measured: Measured, plan: Plan) -> None:
    """Print the tables."""
    rows = [
        (
            f"{count}: {policy}",
            *(runs[count].alone_p50_ms, runs[count].alone_p99_ms),
            *(runs[count].p50_ms, runs[count].p99_ms, runs[count].ratio),
            *(f"{runs[count].tokens_per_s:,.0f}", f"{runs[count].in_engines:.1f}"),
        )
        for count in plan.counts
        for policy, runs in measured.floods.items()
    ]
    columns = [
        "tenants: policy",
        "alone p50",
        "p99",
        "flood p50",
        "p99",
        "ratio",
        "tokens/s",
        "in engines",
    ]
    print_table("wait in ms of tenants that ask once a second", columns, rows)
    greedy = [
        (
            policy,
            *(f"{share:.3f}" for share in one.of_due.values()),
            f"{one.share_error:.1%}",
            f"{one.largest_difference:,.0f}",
            *(f"{one.tokens_per_s:,.0f}", f"{one.in_engines:.1f}"),
        )
        for policy, one in measured.greed.items()
    ]
    names = [name for one in measured.greed.values() for name in one.of_due][:3]
    columns = ["policy", *names, "largest error", "largest difference", "tokens/s", "in engines"]
    print_table("service by what the weights 1, 2 and 4 give, while all wait", columns, greedy)
    print_table("targets", ["", ""], targets(measured).items())
    print(machine())


def _chosen(_: click.Context, __: click.Parameter, value: str) -> list[Policy]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if unknown := sorted(set(names) - set(POLICIES)):
        raise click.BadParameter(f"{', '.join(unknown)}: known are {', '.join(POLICIES)}")
    return [one for one in POLICIES if one in names]


def _numbers(_: click.Context, __: click.Parameter, value: str) -> list[int]:
    numbers = [word.strip() for word in value.split(",") if word.strip()]
    if not all(word.isdigit() and int(word) >= 2 for word in numbers):
        raise click.BadParameter("numbers from 2, separated by commas")
    return [int(word) for word in numbers]


@click.command(context_settings={"show_default": True})
@click.option("--counts", default="2,10,50", callback=_numbers, help="Tenants of a flood.")
@click.option("--policies", default=",".join(POLICIES), callback=_chosen, help="Which of them.")
@click.option("--seconds", default=60.0, type=click.FloatRange(5), help="Over which shares count.")
@click.option("--flood-s", default=30.0, type=click.FloatRange(5), help="The same of a flood.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    counts: list[int],
    policies: list[Policy],
    seconds: float,
    flood_s: float,
    *,
    quick: bool,
    as_json: bool,
) -> None:
    """Compare ways to share a yard among tenants; exit with 1 where a target is missed."""
    end_in_order()
    plan = Plan(
        SPEED, GREED_SPEED, counts, policies, Phases(10, flood_s, 5), Phases(10, seconds, 5)
    )
    if quick:
        phases = Phases(1, 5, 1)
        plan = Plan(_QUICK_SPEED, _QUICK_SPEED, [3], ["tenants"], phases, phases)
    measured = measure(plan)
    publish(figures(measured), lambda: show(measured, plan), as_json=as_json)
    wrong = [*faults(measured), *([] if quick else missed(targets(measured)))]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
