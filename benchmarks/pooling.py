"""How much of vLLM's speed remains behind Tokenyard for tasks that pool, and for pictures?

Embeddings of short texts by `Client.map`, and by a batch job on a table in Parquet, of `LLM.embed`
on the same rows; scores of one query with 100 documents, of `LLM.score`; captions of 200 pictures
by a batch job, of `LLM.chat`: rows per second with tiny models, one side after the other, in
several rounds. The engine of `LLM` is in its own process, which is faster here. All answers are
compared. Embeddings and ranks of 100 documents over HTTP, of vLLM's server: requests per second of
vLLM's own client, 64 at once.

    python -m benchmarks.pooling [--rows 20000] [--rounds 3] [--json] [--quick]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow
from pyarrow import parquet

from benchmarks.bridge import running_door
from benchmarks.child import TIMEOUT_S, run_child
from benchmarks.cold_start.serve import HOST, served
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.media_models import picture, write_picture_model
from benchmarks.pooling_models import write_pooling_model
from benchmarks.progress import exit_if_failed, publish
from benchmarks.yard import ServingYard, embedded_broker, end_in_order, vllm_yard
from tokenyard import Client, arrays
from worker.models import ModelSpec

#: Requests that the engines run in a step.
MAX_NUM_SEQS: Final = 64
#: Documents of a score.
DOCUMENTS: Final = 100
#: Rounding in another batch.
MOST_DIFFERENCE: Final = 1e-5
_TASKS: Final[dict[str, Callable[[Path], Path]]] = {
    "embed": partial(write_pooling_model, "bert"),
    "table": partial(write_pooling_model, "bert"),
    "score": partial(write_pooling_model, "cross"),
    "caption": write_picture_model,
    "http": partial(write_pooling_model, "bert"),
    "rerank": partial(write_pooling_model, "cross"),
}
#: Requests over HTTP that wait at the same time, and most rows that are asked for.
AT_ONCE: Final = 64
_ROWS_BY_HTTP: Final = {"http": 4_000, "rerank": 20_000}
#: Pictures to caption, and how.
PICTURES: Final = 200
CAPTION: Final[dict[str, Any]] = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
QUESTION: Final = "what"
#: Ratio -> target.
TARGETS: Final = {
    "embed": 0.95,
    "table": 0.95,
    "score": 1.0,
    "caption": 0.95,
    "http": 1.0,
    "rerank": 1.0,
}
#: The options of `batch run`.
_TABLES: Final = {
    "table": ["--task", "embed", "--column", "text"],
    "caption": [
        *("--message", QUESTION, "--image", "image"),
        *(f"--param={name}={json.dumps(value)}" for name, value in CAPTION.items()),
    ],
}
_QUICK_ROWS: Final = 2_000
_WORDS: Final = ("river", "stone", "cloud", "letter", "garden", "winter", "number", "window")


def rows(count: int) -> list[str]:
    """Short texts, all different."""
    size = len(_WORDS)
    return [
        f"{_WORDS[at % size]} {at} {_WORDS[at // size % size]} {_WORDS[at // size**2 % size]}"
        for at in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Round:
    """Rows per second of both sides, and how far their numbers differ at most."""

    yard: float
    direct: float
    difference: float


def measure(task: str, count: int, rounds: int) -> list[Round]:
    """Measure a task in a yard of its own."""
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        model = _TASKS[task](Path(folder) / "model")
        count = PICTURES if task == "caption" else count
        options = [*("--max-num-seqs", str(MAX_NUM_SEQS), "--dtype", "float32", "--enforce-eager")]
        with (
            embedded_broker() as broker,
            vllm_yard(broker, "pooling", 1, model, worker_options=options) as yard,
            Client(yard.url, yard.name, result_timeout_s=TIMEOUT_S) as client,
        ):
            if most := _ROWS_BY_HTTP.get(task):
                return _over_http(yard, task, model, min(count, most), rounds)
            asked = "embed" if task == "table" else task
            if task == "caption":
                _by_job(yard, Path(folder), task, 20)  # warms up
            else:
                _by_yard(client, asked, rows(500))
            found = []
            for _ in range(rounds):
                direct = run_child(
                    "benchmarks.pooling_child",
                    [asked, str(model), str(count), str(MAX_NUM_SEQS)],
                    environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                    timeout_s=TIMEOUT_S,
                )
                if task in _TABLES:
                    seconds, numbers = _by_job(yard, Path(folder), task, count)
                else:
                    began = time.perf_counter()
                    numbers = _by_yard(client, task, rows(count))
                    seconds = time.perf_counter() - began
                found.append(
                    Round(
                        len(numbers) / seconds,
                        len(numbers) / direct["seconds"],
                        _difference(numbers, direct["some"]),
                    )
                )
        return found


def _over_http(yard: ServingYard, task: str, model: Path, count: int, rounds: int) -> list[Round]:
    spec = ModelSpec(
        model.name,
        str(model),
        dtype="float32",
        max_model_len=64,
        kv_cache_gib=0.25,
        max_num_seqs=MAX_NUM_SEQS,
        enforce_eager=True,
    )
    with (
        served(spec) as server,
        running_door(["gateway", "--redis-url", yard.url, "--yard", yard.name]) as gateway,
    ):
        server.wait_until_healthy()
        gateway.wait_until_ready(model.name)
        urls = [f"http://{HOST}:{server.port}", gateway.url]
        words = [task, str(model), str(count), str(rounds), *urls]
        found = run_child("benchmarks.pooling_http", words, timeout_s=TIMEOUT_S)
    return [Round(ours, theirs, 0.0) for theirs, ours in found]


def _by_job(yard: ServingYard, folder: Path, task: str, count: int) -> tuple[float, list[Any]]:
    """The answers to all rows of a table, and the seconds that `tokenyard batch run` takes."""
    source, target = folder / "rows.parquet", folder / "answered.parquet"
    given = {"text": rows(count)} if task == "table" else {"image": [*map(picture, range(count))]}
    parquet.write_table(pyarrow.table(given), source)
    words = ["--redis-url", yard.url, "--yard", yard.name, "batch", "run", str(source)]
    words += ["-o", str(target), "--overwrite", *_TABLES[task]]
    began = time.perf_counter()
    program = [sys.executable, "-m", "tokenyard", *words]
    subprocess.run(program, check=True, capture_output=True, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - began
    found = parquet.read_table(target)
    if task == "caption":
        return seconds, found["generated_text"].to_pylist()
    return seconds, [np.array(one, np.float32) for one in found["embedding"].to_pylist()]


def _by_yard(client: Client, task: str, texts: Sequence[str]) -> list[Any]:
    """The numbers of all rows; raises `ValueError` where one has none."""
    if task == "embed":
        results = [result for _, result in client.map(texts, ordered=True, task="embed")]
        numbers = [one for result in results for one in arrays(result)]
    else:
        handles = [
            client.submit(texts[at : at + DOCUMENTS], task="score", query=texts[0])
            for at in range(0, len(texts), DOCUMENTS)
        ]
        numbers = [one for handle in handles for one in arrays(handle.result())]
    if len(numbers) != len(texts) or any(one is None for one in numbers):
        raise ValueError(f"{len(numbers)} numbers for {len(texts)} rows, or a row without any")
    return numbers


def _difference(numbers: Sequence[Any], some: dict[str, Any]) -> float:
    """The largest difference of any number of the rows that were sampled; 1 for another text."""
    if isinstance(numbers[0], str):
        return max(float(numbers[int(at)] != theirs) for at, theirs in some.items())
    return max(
        float(abs(numbers[int(at)].reshape(-1) - theirs).max()) for at, theirs in some.items()
    )


def summary(found: dict[str, list[Round]]) -> dict[str, Any]:
    """The medians."""
    figures: dict[str, Any] = {
        "max_difference": max(one.difference for task in found.values() for one in task)
    }
    for task, rounds in found.items():
        figures[f"{task}_ratio"] = round(statistics.median(r.yard / r.direct for r in rounds), 3)
        figures[f"{task}_per_s"] = round(statistics.median(r.yard for r in rounds))
        figures[f"{task}_direct_per_s"] = round(statistics.median(r.direct for r in rounds))
    return figures


@click.command(help=__doc__.partition("\n")[0])
@click.option("--rows", "count", default=20_000, type=click.IntRange(min=DOCUMENTS))
@click.option("--rounds", default=3, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quick", is_flag=True, help="One short round.")
def main(count: int, rounds: int, *, as_json: bool, quick: bool) -> None:
    """Measure, and compare the numbers."""
    end_in_order()
    if quick:
        count, rounds = _QUICK_ROWS, 1
    found = {task: measure(task, count, rounds) for task in _TASKS}
    figures = summary(found)

    def show() -> None:
        cells = [
            (
                task,
                f"{figures[f'{task}_per_s']:,}",
                f"{figures[f'{task}_direct_per_s']:,}",
                f"{figures[f'{task}_ratio']:.2f} ({TARGETS[task]:.2f})",
            )
            for task in found
        ]
        print_table(
            "rows per second, median",
            ("task", "Tokenyard", "vLLM's LLM", "ratio (wanted)"),
            cells,
        )
        print(f"largest difference {figures['max_difference']:.1e}\n{machine()}")

    publish(figures, show, as_json=as_json)
    differs = figures["max_difference"] > MOST_DIFFERENCE
    exit_if_failed({"numbers": "they are not those of vLLM"} if differs else {})


if __name__ == "__main__":
    main()
