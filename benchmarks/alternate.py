"""Two models take turns on one device: what do the swaps cost, and is every answer right?

A yard with one slot gets arithmetic requests for the adder and the subtractor in turn (A-B-A-B),
compared with as many requests for the adder alone. Loads: all requests submitted together, and a
limited number under way. Swaps: by unloading, and with a sleeper. By default the waits follow from
the cost of swaps, as in any yard. Two swaps must be at least the longest wait of a model apart, and
swaps must not take more of the device's time than the coordinator allows.

    python -m benchmarks.alternate [--requests 1000] [--json] [--quick]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import redis

from benchmarks.cold_start.case import MODELS, WrongAnswer
from benchmarks.device import on_gpu, used_mib, wait_until_free
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import limit_option, publish, save, tell, told
from benchmarks.sums import ADDER, ANSWER_TOKENS, SUBTRACTOR, Question, questions
from benchmarks.yard import ServingYard, embedded_broker, end_in_order, models_yard, read_commands
from coordinator.placement.needs import LEAST_S, cost_s, turn_s
from tokenyard import Client
from tokenyard.client.options import FullPrompt
from tokenyard.protocol.control import Command
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.yard.snapshot import read_yard

EXAMPLE: Final = Path(__file__).parent.parent / "examples" / "arithmetic" / "models.toml"
#: The default of a yard.
MAX_SWAP_SHARE: Final = CoordinatorSettings(redis_url="redis://nowhere").max_swap_share
#: A run fails if no result arrives for this long.
PATIENCE_S: Final = 120.0
_YARD: Final = "alternate"
#: How a model gives way, with the number of sleepers for it.
_KINDS: Final = {"sleep": 1, "unload": 0}
#: The coordinator counts from when the old model gives way, a moment after the command.
_MARGIN_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests and rounds of a measurement."""

    requests: int
    outstanding: int
    max_model_wait_s: float  # 0: derived from the cost of swaps
    rounds: int
    limit_s: float | None = None  # per kind of swap; no round starts that would exceed it

    @property
    def windows(self) -> Mapping[str, int]:
        """Most requests under way, by load."""
        return {"at_once": self.requests, f"of_{self.outstanding}": self.outstanding}


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of some questions."""

    requests: int
    per_s: float
    wrong: int
    swaps_s: Sequence[float]  # unix times


@dataclass(frozen=True, slots=True)
class Round:
    """A run with the adder alone, then one with both models in turn."""

    alone: Run
    in_turn: Run


@dataclass(frozen=True, slots=True)
class Report:
    """One kind of swap under one load: medians over the rounds, and the number of wrong answers."""

    alone_per_s: float
    in_turn_per_s: float
    ratio: float
    swaps: float
    requests_per_turn: float
    closest_swaps_s: float | None  # including swaps between runs
    swap_s: float  # cost of one swap, as the host reports at the end
    lost_share: float | None  # mean share of the time between two swaps
    wrong: int
    rounds: int = 1


def swaps_s(commands: Iterable[tuple[int, Command]]) -> list[float]:
    """Unix times at which the coordinator told the only device to change its model."""
    loads = [(at_ms, one.model) for at_ms, one in commands if one.verb == "load"]
    return [at_ms / 1000 for (_, old), (at_ms, new) in itertools.pairwise(loads) if new != old]


def swap_costs(yard: ServingYard) -> Mapping[str, float]:
    """Seconds of the last swap of each model, as the only host reports."""
    with redis.Redis.from_url(yard.url, socket_timeout=10.0) as connection:
        [host] = read_yard(Yard(connection, Keys(yard.name))).hosts
    return {model.name: cost_s(model) for model in host.models}


class Asker:
    """Sends questions to a yard with one device, which holds the adder or the subtractor."""

    def __init__(self, yard: ServingYard, client: Client, max_model_wait_s: float) -> None:
        self._yard = yard
        self._client = client
        self._told_s = max_model_wait_s

    def measure(self, requests: int, window: int) -> Round:
        """Send the requests for one model, then for both, with at most ``window`` under way."""
        self.hold(ADDER)
        alone = self._ask(questions([ADDER], requests), window)
        self.hold(ADDER)
        return Round(alone, self._ask(questions([ADDER, SUBTRACTOR], requests), window))

    def hold(self, model: str) -> None:
        """Make the yard load a model, and wait until another may replace it."""
        if self._ask(questions([model], 1), 1).wrong:
            raise WrongAnswer(f"{model} gave a wrong answer")
        if swaps := self._swaps_s():
            time.sleep(max(0.0, swaps[-1] + self._wait_s() + _MARGIN_S - time.time()))

    def _wait_s(self) -> float:
        """Seconds for which a device keeps its model."""
        return self._told_s or turn_s(max(swap_costs(self._yard).values()), MAX_SWAP_SHARE)

    def _ask(self, asked: Sequence[Question], window: int) -> Run:
        items: Iterator[FullPrompt] = ({"prompt": one.prompt, "model": one.model} for one in asked)
        before, began = len(self._swaps_s()), time.perf_counter()
        results = self._client.map(items, window=window, max_tokens=ANSWER_TOKENS, temperature=0.0)
        right = sum(result.text == asked[number].answer for number, result in results)
        seconds = time.perf_counter() - began
        return Run(len(asked), len(asked) / seconds, len(asked) - right, self._swaps_s()[before:])

    def _swaps_s(self) -> list[float]:
        return swaps_s(read_commands(self._yard))


def measure(sleepers: int, plan: Plan) -> dict[str, Report]:
    """Measure all loads in a yard whose models sleep, or unload, when they give way."""
    began = time.monotonic()
    # On a GPU, vLLM's kernels for the example's adapters do not support float32.
    models = MODELS if on_gpu() else EXAMPLE
    with (
        embedded_broker() as broker,
        models_yard(
            broker, _YARD, models, max_model_wait_s=plan.max_model_wait_s, sleepers=sleepers
        ) as yard,
        Client(yard.url, yard=yard.name, result_timeout_s=PATIENCE_S) as client,
    ):
        asker = Asker(yard, client, plan.max_model_wait_s)
        for model in (ADDER, SUBTRACTOR):
            asker.hold(model)  # load each once before timing anything
        tell(f"{sleepers} sleepers: both models have been there, {time.monotonic() - began:.0f} s")
        rounds = list(_rounds(asker, plan, began))
        pairs = itertools.pairwise(swaps_s(read_commands(yard)))
        gaps_s = [later - sooner for sooner, later in pairs]
        swap_s = statistics.mean(swap_costs(yard)[model] for model in (ADDER, SUBTRACTOR))
    return {name: _report([one[name] for one in rounds], gaps_s, swap_s) for name in plan.windows}


def _rounds(asker: Asker, plan: Plan, began: float) -> Iterator[Mapping[str, Round]]:
    """Run as many rounds as planned and possible within the limit, at least one."""
    round_s = 0.0
    for number in range(plan.rounds):
        now = time.monotonic()
        if number and plan.limit_s is not None and now + round_s - began > plan.limit_s:
            tell("no time for another round")
            return
        yield {name: asker.measure(plan.requests, window) for name, window in plan.windows.items()}
        round_s = time.monotonic() - now


def _report(rounds: Sequence[Round], gaps_s: Sequence[float], swap_s: float) -> Report:
    swaps = statistics.median(len(one.in_turn.swaps_s) for one in rounds)
    return Report(
        alone_per_s=statistics.median(one.alone.per_s for one in rounds),
        in_turn_per_s=statistics.median(one.in_turn.per_s for one in rounds),
        ratio=statistics.median(one.in_turn.per_s / one.alone.per_s for one in rounds),
        swaps=swaps,
        requests_per_turn=rounds[0].in_turn.requests / (swaps + 1),
        closest_swaps_s=min(gaps_s, default=None),
        swap_s=swap_s,
        lost_share=swap_s / statistics.mean(gaps_s) if gaps_s else None,
        wrong=sum(one.alone.wrong + one.in_turn.wrong for one in rounds),
        rounds=len(rounds),
    )


def measure_kinds(plan: Plan) -> tuple[dict[str, Report], list[str]]:
    """Measure both kinds of swap; returns the reports, and a message for each failure."""
    reports: dict[str, Report] = {}
    failed: list[str] = []
    before_mib = used_mib()
    for kind, sleepers in _KINDS.items():
        try:
            wait_until_free(before_mib)
            found = measure(sleepers, plan)
        except Exception as fault:  # noqa: BLE001 - the other kind runs after any failure
            failed.append(f"{kind} failed: {told(fault)}")
            tell(failed[-1])
        else:
            reports |= {f"{kind}_{name}": one for name, one in found.items()}
            tell(", ".join(f"{kind}_{name}: ratio {one.ratio:.2f}" for name, one in found.items()))
        save(figures(reports, failed))
    return reports, failed


def figures(reports: Mapping[str, Report], failed: Sequence[str]) -> dict[str, Any]:
    """The figures for ``--json``."""
    rounded = {name: _rounded(one) for name, one in reports.items()}
    return {**rounded, "failed": list(failed)}


def faults(reports: Mapping[str, Report], max_model_wait_s: float, *, targets: bool) -> list[str]:
    """The faults that the reports show, in words; with ``targets``, also too much lost to swaps."""
    found = [f"{name}: {one.wrong} wrong answers" for name, one in reports.items() if one.wrong]
    for name, one in reports.items():
        if not one.swaps or one.closest_swaps_s is None or one.lost_share is None:
            found.append(f"{name}: too few swaps to judge them")
            continue
        if one.closest_swaps_s < (max_model_wait_s or LEAST_S):
            found.append(f"{name}: two swaps within {one.closest_swaps_s:.2f} s")
        if targets and not max_model_wait_s and one.lost_share > MAX_SWAP_SHARE:
            found.append(f"{name}: swaps take {100 * one.lost_share:.1f} % of the time")
    return found


def _rounded(one: Report) -> dict[str, float | None]:
    figures: dict[str, float | None] = asdict(one)
    return {name: value if value is None else round(value, 3) for name, value in figures.items()}


def show(reports: Mapping[str, Report], plan: Plan) -> None:
    """Print the table."""
    labels = {
        "requests/s, the adder alone": "alone_per_s",
        "requests/s, both in turn": "in_turn_per_s",
        "in turn / alone": "ratio",
        "swaps": "swaps",
        "requests between two swaps": "requests_per_turn",
        "closest swaps, s": "closest_swaps_s",
        "a swap costs, s": "swap_s",
        "lost to swaps": "lost_share",
        "wrong answers": "wrong",
        "rounds": "rounds",
    }
    rows = [
        (label, *(getattr(one, field) for one in reports.values()))
        for label, field in labels.items()
    ]
    turns = f"{plan.max_model_wait_s:g} s at least" if plan.max_model_wait_s else "by cost"
    title = f"{machine()}: {plan.requests:,} requests, turns {turns}; medians"
    print_table(title, ["", *reports], rows)


@click.command(context_settings={"show_default": True})
@click.option(
    "--requests",
    type=click.IntRange(2),
    help="Of one run.  [default: 1000; on a GPU, where a swap takes longer, 200]",
)
@click.option("--outstanding", default=64, type=click.IntRange(1), help="Of the second load.")
@click.option(
    "--max-model-wait-s", default=0.0, help="Shortest time between two swaps; 0: by their cost."
)
@click.option("--rounds", default=3, type=click.IntRange(1), help="Medians are shown.")
@limit_option("On a GPU: no round but the first of each kind begins that would end later.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    requests: int | None,
    outstanding: int,
    max_model_wait_s: float,
    rounds: int,
    limit_s: float,
    *,
    quick: bool,
    as_json: bool,
) -> None:
    """Have two models take turns on one device, and compare with one of them alone."""
    end_in_order()
    requests = requests or (200 if on_gpu() else 1000)
    each_s = limit_s / len(_KINDS) if on_gpu() else None
    plan = Plan(requests, outstanding, max_model_wait_s, rounds, each_s)
    if quick:
        plan = Plan(200, 64, max_model_wait_s, 1)
    reports, failed = measure_kinds(plan)
    publish(figures(reports, failed), lambda: show(reports, plan), as_json=as_json)
    if found := failed + faults(reports, plan.max_model_wait_s, targets=not quick):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
