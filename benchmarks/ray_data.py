"""Embeddings of a table by `tokenyard batch run`, and by Ray Data's processor for vLLM.

Both are commands that read a table in Parquet and write another. Tables of two lengths tell their
start from their rows per second: Ray loads its engine in each, Tokenyard's is warm. Then each is
killed halfway and run again.

    python -m benchmarks.ray_data [--rows 20000] [--rounds 3] [--json]
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow
from pyarrow import parquet

from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.peers import PROGRAMS, Peer, interpreter
from benchmarks.pooling import MAX_NUM_SEQS, MOST_DIFFERENCE, rows
from benchmarks.pooling_models import write_pooling_model
from benchmarks.progress import exit_if_failed, publish
from benchmarks.yard import ServingYard, embedded_broker, end_in_order, last_lines, vllm_yard
from tokenyard.process.children import start_child, stop_child

#: The shorter table has so many times fewer rows.
_SHORTER: Final = 10
_TIMEOUT_S: Final = 1200.0
_STOP_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Side:
    """A command that reads a table and writes another."""

    name: str
    command: Callable[[Path, Path], Sequence[str]]  # for the two tables
    environment: Mapping[str, str]

    def run(self, source: Path, target: Path, *, killed_after_s: float = 0.0) -> float:
        """The seconds that it takes; raises `ChildProcessError` where it fails by itself."""
        log = target.with_name(f"{target.name}.log")
        environment = {**os.environ, **self.environment}
        began = time.perf_counter()
        process = start_child(self.command(source, target), log, env=environment)
        try:
            if killed_after_s:
                time.sleep(killed_after_s)
                if process.poll() is not None:
                    raise ChildProcessError(f"{self.name} ended before it was killed")
                process.send_signal(signal.SIGKILL)
            if process.wait(_TIMEOUT_S) and not killed_after_s:
                raise ChildProcessError(f"{self.name}:\n{last_lines(log.read_text())}")
        finally:
            stop_child(process, _STOP_S)
        return time.perf_counter() - began


def sides(yard: ServingYard, model: Path) -> list[Side]:
    """Tokenyard and Ray."""
    python = interpreter(Peer("ray", 0))
    packages = {"PYTHONPATH": sysconfig.get_path("purelib")}

    def ours(source: Path, target: Path) -> list[str]:
        words = [sys.executable, "-m", "tokenyard", "--redis-url", yard.url, "--yard", yard.name]
        words += ["batch", "run", str(source), "-o", str(target)]
        return [*words, "--task", "embed", "--column", "text"]

    def theirs(source: Path, target: Path) -> list[str]:
        program = str(PROGRAMS / "ray_peer.py")
        return [python, program, str(model), str(source), str(target), str(MAX_NUM_SEQS)]

    return [Side("tokenyard", ours, {}), Side("ray", theirs, packages)]


def answered(target: Path) -> dict[str, Any]:
    """The texts that have an answer, and some of these."""
    table = parquet.read_table(target)
    texts = table["text"].to_pylist()
    places = sorted(range(len(texts)), key=texts.__getitem__)[:: max(1, len(texts) // 50)]
    numbers = table["embedding"].take(places).to_pylist()
    some = {texts[at]: np.array(one, np.float32) for at, one in zip(places, numbers, strict=True)}
    return {"texts": texts, "some": some}


def measure(side: Side, tables: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Rows per second beyond its start, its start, and what a kill halfway costs."""
    few, many = (len(parquet.read_table(table)) for table in tables)
    targets = [folder / f"{side.name}-{one}.parquet" for one in ("short", "long", "killed")]
    short, long = (side.run(*one) for one in zip(tables, targets, strict=False))
    whole = answered(targets[1])
    if len(set(whole["texts"])) != many:
        raise ValueError(f"{side.name}: {len(set(whole['texts']))} answers to {many} rows")
    if long <= short:
        raise ValueError(f"{side.name}: {many} rows take no longer than {few}; give more --rows")
    per_row = (long - short) / (many - few)
    start = max(0.0, short - few * per_row)
    side.run(tables[1], targets[2], killed_after_s=start + many * per_row / 2)
    again = side.run(tables[1], targets[2])
    found = answered(targets[2])["texts"]
    figures = {"rows_per_s": 1 / per_row, "start_s": start, "again_s": again}
    rows_then = {"rows": len(found), "distinct_rows": len(set(found))}
    return {**figures, **rows_then, "some": whole["some"]}


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference between the numbers of texts that both have."""
    return max(float(abs(one[text] - other[text]).max()) for text in one.keys() & other.keys())


@click.command(help=__doc__.partition("\n")[0])
@click.option("--rows", "count", default=20_000, type=click.IntRange(min=1_000))
@click.option("--rounds", default=3, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(count: int, rounds: int, *, as_json: bool) -> None:
    """Measure both sides in turn."""
    end_in_order()
    found: dict[str, list[dict[str, Any]]] = {"tokenyard": [], "ray": []}
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as name:
        folder = Path(name)
        model = write_pooling_model("bert", folder / "model")
        tables = [folder / "short.parquet", folder / "long.parquet"]
        for table, length in zip(tables, (count // _SHORTER, count), strict=True):
            parquet.write_table(pyarrow.table({"text": rows(length)}), table)
        options = ["--max-num-seqs", str(MAX_NUM_SEQS), "--dtype", "float32", "--enforce-eager"]
        with (
            embedded_broker() as broker,
            vllm_yard(broker, "ray", 1, model, worker_options=options) as yard,
        ):
            for number in range(rounds):
                own = folder / str(number)
                own.mkdir()
                for side in sides(yard, model):
                    found[side.name].append(measure(side, tables, own))
    figures: dict[str, Any] = {
        f"{name}_{what}": round(statistics.median(one[what] for one in rounds_of), 2)
        for name, rounds_of in found.items()
        for what in rounds_of[0]
        if what != "some"
    }
    pairs = zip(found["tokenyard"], found["ray"], strict=True)
    ratios = [ours["rows_per_s"] / theirs["rows_per_s"] for ours, theirs in pairs]
    figures["ratio"] = round(statistics.median(ratios), 2)
    figures["max_difference"] = difference(*(one[0]["some"] for one in found.values()))

    def show() -> None:
        names = ("rows_per_s", "start_s", "again_s", "rows", "distinct_rows")
        cells = [(name, *(f"{figures[f'{name}_{what}']:,}" for what in names)) for name in found]
        titles = ("", "rows/s", "start s", "after a kill s", "rows then", "distinct")
        print_table(f"{count:,} short texts, medians of {rounds}", titles, cells)
        print(f"rows/s of Ray's: {figures['ratio']} (wanted 1.0)\n{machine()}")

    publish(figures, show, as_json=as_json)
    differs = figures["max_difference"] > MOST_DIFFERENCE
    exit_if_failed({"numbers": "the sides differ"} if differs else {})


if __name__ == "__main__":
    main()
