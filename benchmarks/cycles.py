"""Does a worker process leak memory as it loads and unloads models?

One warm process loads two arithmetic models in turn, 50 times; it answers questions and unloads the
model each time. The memory after each cycle is judged as the pool judges it (`worker.host.leak`):
by steady growth. The pool replaces a process that leaks; `--keep` forbids that, to show the growth
of a single process. The exit status is not 0 if an answer is wrong, or if a process leaks, replaced
or not.

    python -m benchmarks.cycles [--cycles 50] [--keep] [--json] [--quick]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Final

import click
import msgspec

from benchmarks.child import TIMEOUT_S, run_child
from benchmarks.cycles_child import Cycle
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import publish
from benchmarks.yard import end_in_order
from worker.engines import Memory
from worker.host.leak import FLOOR_MIB, READINGS, MemoryHistory, Verdict

#: MiB of tolerated growth at which the pool never replaces a process.
_ANY: Final = 1e9
#: Cycles whose memory the table shows, besides the last.
_SHOWN: Final = (1, 2, 5, 10, 20, 30, 40)
#: Upper bound of a cycle, including a replacement of the process.
_CYCLE_S: Final = 60.0
_MIB: Final = 1024**2


def run(cycles: int, *, keep: bool) -> list[Cycle]:
    """Run the cycles in sequence on one device."""
    arguments = [str(cycles), str(_ANY if keep else FLOOR_MIB)]
    timeout_s = TIMEOUT_S + cycles * _CYCLE_S
    return msgspec.convert(
        run_child("benchmarks.cycles_child", arguments, timeout_s=timeout_s), list[Cycle]
    )


def leaks(cycles: Sequence[Cycle]) -> int:
    """How often the pool replaced the process, or should have."""
    found, history = 0, MemoryHistory()
    for one in cycles:
        if one.after is None:  # the next cycle runs in a new process
            found, history = found + 1, MemoryHistory()
            continue
        if history.baseline is None:
            history.note_warm(one.warm)
        history.note_loaded(one.loaded)
        history.note_warm(one.after)
        if history.verdict is not Verdict.SOUND:
            found, history = found + 1, MemoryHistory()
    return found


def summary(cycles: Sequence[Cycle]) -> dict[str, float]:
    """The figures, in MiB, seconds and percent."""
    last = cycles[-1]
    figures = {
        "cycles": len(cycles),
        "wrong_answers": sum(one.wrong for one in cycles),
        "replaced": sum(one.after is None for one in cycles),
        "leaks": leaks(cycles),
        "seconds_per_cycle": statistics.median(one.seconds for one in cycles),
        "warm_mib": last.warm.scarce / _MIB,
        "loaded_mib": last.loaded.scarce / _MIB,
        "kept_percent_most": 100 * max(one.kept for one in cycles),
        "kept_percent_last": 100 * last.kept,
    }
    return {name: round(value, 3) for name, value in figures.items()}


def show(cycles: Sequence[Cycle]) -> None:
    """Print the figures and the course of the memory."""
    rows = [
        (
            f"after {number}",
            _mib(cycles[number - 1].after),
            f"{100 * cycles[number - 1].kept:+.2f} %",
        )
        for number in sorted({*_SHOWN, len(cycles)})
        if number <= len(cycles)
    ]
    print_table("memory of the process, MiB", ["", "resident", "above warm"], rows)
    print_table("load and unload", ["", ""], summary(cycles).items())
    print(machine())


def _mib(memory: Memory | None) -> str:
    if memory is None:
        return "replaced"
    gpu = f", GPU {memory.device / _MIB:,.1f}" if memory.device else ""
    return f"{memory.host / _MIB:,.1f}{gpu}"


@click.command(context_settings={"show_default": True})
@click.option(
    "--cycles", default=50, type=click.IntRange(READINGS), help="Models that come and go."
)
@click.option("--keep", is_flag=True, help="Replace no process, however much it keeps.")
@click.option("--quick", is_flag=True, help="As many as a verdict needs, and two more, for CI.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(cycles: int, *, keep: bool, quick: bool, as_json: bool) -> None:
    """Load and unload models in one process, and watch its memory."""
    end_in_order()
    done = run(READINGS + 2 if quick else cycles, keep=keep)
    figures = summary(done)
    publish(figures, lambda: show(done), as_json=as_json)
    if figures["wrong_answers"]:
        sys.exit(f"{figures['wrong_answers']} wrong answers")
    if figures["leaks"]:
        sys.exit(f"the memory of the process grows and grows: {figures['leaks']} leaks")


if __name__ == "__main__":
    main()
