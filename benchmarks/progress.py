"""Reports the figures of a benchmark: so far, in case it is cut off, and at its end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from benchmarks.machine import machine_facts

FC = TypeVar("FC", bound=Callable[..., Any])
#: Variable that names the file for what ``--json`` would print now.
OUT: Final = "TOKENYARD_BENCH_OUT"
#: Variable with a benchmark's time limit in seconds, unless its command line sets one.
LIMIT: Final = "TOKENYARD_BENCH_LIMIT_S"


def tell(line: str) -> None:
    """Print a line on standard error immediately."""
    print(line, file=sys.stderr, flush=True)


def save(figures: Mapping[str, Any]) -> None:
    """Write the figures, with the machine, atomically to the file that `OUT` names, if any."""
    if not os.environ.get(OUT):
        return
    path = Path(os.environ[OUT])
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(_packed(figures) + "\n")
    beside.replace(path)


def publish(figures: Mapping[str, Any], show: Callable[[], None], *, as_json: bool) -> None:
    """Save the figures, and print them as one JSON object or as tables."""
    save(figures)
    if as_json:
        print(_packed(figures))
    else:
        show()


def _packed(figures: Mapping[str, Any]) -> str:
    return json.dumps({**figures, "machine": machine_facts()})


def limit_option(text: str) -> Callable[[FC], FC]:
    """The option of a benchmark's time limit."""
    return click.option(
        "--limit-s",
        default=420.0,
        envvar=LIMIT,
        type=click.FloatRange(min=0.0, min_open=True),
        help=text,
    )


def exit_if_failed(failed: Mapping[str, str]) -> None:
    """Exit with the parts that failed, if any."""
    if failed:
        sys.exit("\n".join(f"{part} failed: {words}" for part, words in failed.items()))


def told(fault: BaseException) -> str:
    """A fault in words, with its type if the message says little."""
    words = str(fault).strip()
    return words if "\n" in words else f"{type(fault).__name__}: {words}"
