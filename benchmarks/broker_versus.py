"""Is this checkout faster or slower than another? Throughput and CPU time of `benchmarks.broker`.

The yards of both run at once and are loaded in turn, in bursts of half a second or so: a machine
whose speed drifts changes both sides of a pair. Each round starts new yards, so that what differs
between two yards of the same code counts as chance. Each burst is the throughput part of
`benchmarks.broker` in the checkout's own version; both run on this Python's packages.

    git worktree add ../before COMMIT
    python -m benchmarks.broker_versus ../before [--rounds 30] [--pairs 6] [--json]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Final

import click

from benchmarks.measure import print_table
from benchmarks.progress import publish

HERE: Final = Path(__file__).parents[1]
_CHILD: Final = Path(__file__).with_name("broker_bursts.py")
_STOP_S: Final = 30.0
#: Resamples of the rounds for an interval.
_RESAMPLES: Final = 2_000

Pair = tuple["Burst", "Burst"]  # the other checkout, this one
Round = Sequence[Pair]  # of the same two yards


@dataclass(frozen=True, slots=True)
class Burst:
    """How long a burst took, and the CPU seconds of each part of the yard."""

    seconds: float
    cpu_s: Mapping[str, float]


@contextmanager
def side(checkout: Path) -> Iterator[Callable[[int], Burst]]:
    """A yard of that checkout; the function runs so many requests on it."""
    # -P: beside the child lie folders whose names are those of packages.
    process = subprocess.Popen(
        [sys.executable, "-P", _CHILD],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    said, asked = process.stdout, process.stdin
    assert said is not None
    assert asked is not None
    try:
        _answer(said, checkout)

        def run(requests: int) -> Burst:
            print(requests, file=asked, flush=True)
            return Burst(**json.loads(_answer(said, checkout)))

        yield run
    finally:
        asked.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answer(pipe: IO[str], checkout: Path) -> str:
    line = pipe.readline()
    if not line:
        sys.exit(f"the yard of {checkout} ended; its error stands above")
    return line


def measure(sides: tuple[Path, Path], pairs: int, requests: int, number: int) -> Round:
    """One round, on new yards; in turn one side or the other starts first, and is loaded first."""
    order = (0, 1) if number % 2 else (1, 0)
    bursts: list[Pair] = []
    with ExitStack() as stack:
        runs = {at: stack.enter_context(side(sides[at])) for at in order}
        for turn in range(pairs):
            took = {at: runs[at](requests) for at in (order if turn % 2 else order[::-1])}
            bursts.append((took[0], took[1]))
    return bursts


def ratio_of_rates(pairs: Sequence[Pair]) -> float:
    """Requests per second of this checkout to the other's: the median of the pairs."""
    return statistics.median(other.seconds / this.seconds for other, this in pairs)


def ratio_of_cpu(pairs: Sequence[Pair], *, part: str) -> float:
    """CPU time of a part of the yard in all bursts, this checkout's to the other's."""
    other, this = (sum(pair[at].cpu_s[part] for pair in pairs) for at in (0, 1))
    return this / other


def interval(
    rounds: Sequence[Round], ratio: Callable[[Sequence[Pair]], float]
) -> tuple[float, float]:
    """The range of a ratio over resampled rounds, without the outer 2.5 % of each side.

    Whole rounds, since the pairs of one are alike.
    """
    draw = random.Random(0)
    drawn = (draw.choices(rounds, k=len(rounds)) for _ in range(_RESAMPLES))
    found = sorted(ratio(list(chain.from_iterable(some))) for some in drawn)
    cut = _RESAMPLES // 40
    return found[cut], found[-1 - cut]


def summary(rounds: Sequence[Round], requests: int) -> dict[str, float]:
    """Each measure of both sides, the ratio of this one to the other, and its interval."""
    pairs = list(chain.from_iterable(rounds))
    figures = {"rounds": float(len(rounds)), "pairs": len(pairs), "requests": requests}
    for name, at in (("other", 0), ("this", 1)):
        rates = [requests / pair[at].seconds for pair in pairs]
        figures[f"{name}_requests_per_s"] = statistics.median(rates)
    measures: dict[str, Callable[[Sequence[Pair]], float]] = {"requests_per_s": ratio_of_rates}
    for part in pairs[0][0].cpu_s:
        for name, at in (("other", 0), ("this", 1)):
            spent = sum(pair[at].cpu_s[part] for pair in pairs)
            figures[f"{name}_cpu_us_{part}"] = spent / len(pairs) / requests * 1e6
        measures[f"cpu_us_{part}"] = partial(ratio_of_cpu, part=part)
    for name, ratio in measures.items():
        low, high = interval(rounds, ratio)
        figures |= {f"{name}_ratio": ratio(pairs), f"{name}_low": low, f"{name}_high": high}
    return {name: round(value, 3) for name, value in figures.items()}


def show(figures: Mapping[str, float]) -> None:
    """Print the figures as a table."""
    names = [name.removesuffix("_ratio") for name in figures if name.endswith("_ratio")]
    rows = [
        (
            name,
            figures[f"other_{name}"],
            figures[f"this_{name}"],
            f"{figures[f'{name}_ratio']:.3f}",
            f"{figures[f'{name}_low']:.3f} to {figures[f'{name}_high']:.3f}",
        )
        for name in names
    ]
    print_table(
        f"{figures['pairs']:.0f} pairs of bursts of {figures['requests']:.0f} requests, "
        f"in {figures['rounds']:.0f} rounds",
        ("", "other", "this", "ratio", "95 %"),
        rows,
    )


@click.command(context_settings={"show_default": True})
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=30, type=click.IntRange(2), help="Rounds, with new yards each.")
@click.option("--pairs", default=6, type=click.IntRange(1), help="Pairs of bursts in a round.")
@click.option("--requests", default=4_000, type=click.IntRange(1), help="Requests of a burst.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(other: Path, rounds: int, pairs: int, requests: int, quick: bool, as_json: bool) -> None:
    """Compare this checkout with the one in the folder OTHER."""
    if quick:
        rounds, pairs, requests = 2, 2, 500
    sides = (other.resolve(), HERE)
    measured = [measure(sides, pairs, requests, number) for number in range(rounds)]
    figures = summary(measured, requests)
    publish(figures, lambda: show(figures), as_json=as_json)


if __name__ == "__main__":
    main()
