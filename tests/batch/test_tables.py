"""Tables in, tables out: each row keeps its place and its columns, and gets one answer."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.batch.conftest import zstd
from tests.batch.running import batch, start
from tests.batch.test_resume import bytes_of, ended_when_larger
from tests.support.numbers import numbers_of
from tests.support.processes import Plant
from tokenyard import Client
from tokenyard.batch import BatchState, UnreadableFile, run_batch
from tokenyard.batch.files import member, open_text
from tokenyard.batch.state import load_state
from tokenyard.process.program import Exit
from tokenyard.protocol.errors import SettingsError

#: pyarrow may be missing here, but not on a CI machine.
parquet = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None and os.environ.get("CI") != "true",
    reason="pyarrow is not installed, so nothing was tested with Parquet",
)
Rows = list[dict[str, Any]]


def write_parquet(path: Path, rows: Rows) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # In small row groups, and with a type that text does not have.
    table = pa.Table.from_pylist(rows)
    numbers = pa.array([row["n"] for row in rows], pa.int16())
    pq.write_table(table.set_column(0, "n", numbers), path, row_group_size=100)


def read_parquet(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    assert table.schema.field(0).type in {pa.int16(), pa.string(), pa.int64()}
    return list(table.to_pylist())


def write_csv(path: Path, rows: Rows) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(member(path, text.getvalue().encode()))


def read_csv(path: Path) -> Rows:
    with open_text(path) as file, io.TextIOWrapper(file, newline="") as text:
        rows = list(csv.DictReader(text))
    return [{name: _read_cell(name, value) for name, value in row.items()} for row in rows]


def _read_cell(name: str, value: str) -> Any:
    if name == "embedding":
        return json.loads(value) if value else None
    return int(value) if name == "n" else value or None


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_bytes(member(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode()))


def read_jsonl(path: Path) -> Rows:
    with open_text(path) as file:
        return [json.loads(line) for line in file]


FORMATS: dict[str, tuple[Callable[[Path, Rows], None], Callable[[Path], Rows]]] = {
    "parquet": (write_parquet, read_parquet),
    "csv": (write_csv, read_csv),
    "csv.gz": (write_csv, read_csv),
    "jsonl": (write_jsonl, read_jsonl),
    "jsonl.zst": (write_jsonl, read_jsonl),
}
SUFFIXES = [
    pytest.param("parquet", marks=parquet),
    "csv",
    "csv.gz",
    "jsonl",
    pytest.param("jsonl.zst", marks=zstd),
]


class Tables:
    """A job on a table."""

    def __init__(self, plant: Plant, folder: Path) -> None:
        self.plant = plant
        self.folder = folder

    def run(self, source: str, target: str, **options: Any) -> BatchState:
        return run_batch(
            self.folder / source,
            self.folder / target,
            redis_url=self.plant.url,
            yard=self.plant.keys.yard,
            **options,
        )

    def embedded(self, texts: list[str]) -> list[list[float]]:
        """What the yard answers to these texts."""
        with Client(self.plant.url, self.plant.keys.yard) as client:
            return numbers_of(client.submit(texts, task="embed").result())


@pytest.fixture
def tables(plant: Plant, tmp_path: Path) -> Tables:
    return Tables(plant, tmp_path)


def texts(count: int) -> Rows:
    """Rows with a line break, a comma and a quotation mark in them."""
    return [{"n": number, "text": f'row {number},\n"{number}"'} for number in range(count)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_keeps_its_rows_and_gets_a_column(tables: Tables, suffix: str) -> None:
    write, read = FORMATS[suffix]
    rows = texts(700)
    rows[3]["text"] = rows[650]["text"] = ""
    write(tables.folder / f"in.{suffix}", rows)

    state = tables.run(f"in.{suffix}", f"out.{suffix}", task="embed", column="text")

    assert (state.status, state.counts.completed, state.counts.failed) == ("completed", 698, 2)
    found = read(tables.folder / f"out.{suffix}")
    assert [row["n"] for row in found] == list(range(700))
    assert [row["text"] or "" for row in found] == [row["text"] for row in rows]
    failed = [row for row in found if row["embedding_error"]]
    assert [row["n"] for row in failed] == [3, 650]
    assert {row["embedding_error"] for row in failed} == {"invalid_row: 'text' is empty"}
    assert [row["embedding"] for row in failed] == [None, None]
    some = [0, 255, 256, 699]
    assert [found[at]["embedding"] for at in some] == tables.embedded(
        [rows[at]["text"] for at in some]
    )
    requests = tables.plant.connection.scan_iter(
        f"{tables.plant.keys.ledger('*', state.id)}", count=1000
    )
    assert len(list(requests)) < 10


@parquet
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_text_becomes_parquet(tables: Tables, suffix: str) -> None:
    rows = texts(5000)
    FORMATS[suffix][0](tables.folder / f"in.{suffix}", rows)
    state = tables.run(f"in.{suffix}", "out.parquet", task="classify", column="text")
    assert state.counts.completed == 5000
    found = read_parquet(tables.folder / "out.parquet")
    assert [int(row["n"]) for row in found] == list(range(5000))
    assert all(len(row["probs"]) == 2 and row["probs_error"] is None for row in found)


@pytest.mark.parametrize(
    ("option", "asked"),
    [
        ({"prompt": "{{{n}}} {text}?"}, '{0} row 0,\n"0"?'),
        ({"message": "Say {text}"}, [{"role": "user", "content": 'Say row 0,\n"0"'}]),
        ({"column": "text"}, 'row 0,\n"0"'),
        ({"column": "ids"}, [5, 6]),
        ({"column": "chat"}, [{"role": "user", "content": "hi"}]),
    ],
)
def test_a_row_becomes_a_prompt(tables: Tables, option: dict[str, str], asked: Any) -> None:
    chat = [{"role": "user", "content": "hi", "name": None}]
    write_jsonl(tables.folder / "in.jsonl", [{**texts(1)[0], "ids": [5, 6], "chat": chat}])

    state = tables.run("in.jsonl", "out.jsonl", **option, params={"max_tokens": 5}, into="answer")

    assert state.usage.output_tokens == 5
    [row] = read_jsonl(tables.folder / "out.jsonl")
    with Client(tables.plant.url, tables.plant.keys.yard) as client:
        alone = client.submit(asked, max_tokens=5).result()
    assert (row["answer"], row["answer_error"]) == (alone.text, None)


@pytest.mark.parametrize(
    "value", ["a.png", "data:image/png;base64,cGljdHVyZQ==", b"picture", {"bytes": b"picture"}]
)
def test_a_row_has_a_picture(tables: Tables, value: Any) -> None:
    (tables.folder / "a.png").write_bytes(b"picture")
    rows = [{"n": 1, "image": value}, {"n": 2, "image": None}]
    suffix = "jsonl" if isinstance(value, str) else "parquet"
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    FORMATS[suffix][0](tables.folder / f"in.{suffix}", rows)

    tables.run(f"in.{suffix}", f"out.{suffix}", message="What is {n}?", image="image")

    found = FORMATS[suffix][1](tables.folder / f"out.{suffix}")
    url = "data:image/png;base64,cGljdHVyZQ=="
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    parts.append({"type": "text", "text": "What is 1?"})
    with Client(tables.plant.url, tables.plant.keys.yard) as client:
        alone = client.submit([{"role": "user", "content": parts}]).result()
    assert found[0]["generated_text"] == alone.text
    assert found[1]["generated_text_error"] == "invalid_row: the row has no 'image'"


def test_a_picture_that_is_not_there(tables: Tables) -> None:
    write_csv(tables.folder / "in.csv", [{"n": 1, "image": "gone.png"}])
    tables.run("in.csv", "out.csv", message="What is it?", image="image")
    [row] = read_csv(tables.folder / "out.csv")
    assert row["generated_text_error"].endswith("gone.png: No such file or directory")


def test_what_a_line_of_json_holds_stays_as_it_is(tables: Tables) -> None:
    lines = ['{"big": 12345678901234567890.10, "text": "a"}', '{"text": "b", "embedding": 7}']
    lines += ["no object", "", '{"other": [1,  2]}']
    (tables.folder / "in.jsonl").write_text("\n".join(lines))

    state = tables.run("in.jsonl", "out.jsonl", task="embed", column="text")

    assert (state.counts.completed, state.counts.failed) == (1, 3)
    written = (tables.folder / "out.jsonl").read_text().splitlines()
    assert '"big":12345678901234567890.10' in written[0]
    first, second, third, fourth = read_jsonl(tables.folder / "out.jsonl")
    assert len(first["embedding"]) == 8
    assert second["embedding"] == 7
    assert "choose --into" in second["embedding_error"]
    assert third["embedding_error"].startswith("invalid_row: line 3 is not a JSON object")
    assert fourth["embedding_error"] == "invalid_row: the row has no 'text'"
    assert '"other":[1,  2]' in written[3]
    assert list(first) == ["big", "text", "embedding", "embedding_error"]


def test_a_folder_becomes_a_folder(tables: Tables) -> None:
    rows = texts(600)
    for name, some in {"b/2.jsonl": rows[250:], "a.jsonl": rows[:250]}.items():
        path = tables.folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, some)
    (tables.folder / "in" / "_SUCCESS").touch()

    state = tables.run("in", "out", task="embed", column="text")

    assert state.counts.completed == 600
    found = read_jsonl(tables.folder / "out/a.jsonl") + read_jsonl(tables.folder / "out/b/2.jsonl")
    assert [row["n"] for row in found] == list(range(600))
    assert found[599]["embedding"] == tables.embedded([rows[599]["text"]])[0]


def test_a_finished_table_is_not_run_again(tables: Tables) -> None:
    write_jsonl(tables.folder / "in.jsonl", texts(10))
    first = tables.run("in.jsonl", "out.jsonl", task="embed", column="text")
    left = {path.name for path in tables.folder.iterdir()}
    again = tables.run("in.jsonl", "out.jsonl", task="embed", column="text")

    assert left == {"in.jsonl", "out.jsonl", "out.jsonl.state"}
    assert (again.id, again.round, again.times) == (first.id, 1, first.times)
    with pytest.raises(SettingsError, match="column: was 'text' when"):
        tables.run("in.jsonl", "out.jsonl", task="embed", column="other")
    write_jsonl(tables.folder / "in.jsonl", texts(11))
    with pytest.raises(SettingsError, match="is not the file with which"):
        tables.run("in.jsonl", "out.jsonl", task="embed", column="text")
    afresh = tables.run("in.jsonl", "out.jsonl", task="embed", column="text", overwrite=True)
    assert afresh.counts.completed == 11


def test_rows_with_an_error_run_again(tables: Tables) -> None:
    # Given a table with two rows that are too long for the model
    rows = texts(10)
    rows[4]["text"] = rows[7]["text"] = "b" * 9000
    write_jsonl(tables.folder / "in.jsonl", rows)
    first = tables.run("in.jsonl", "out.jsonl", task="embed", column="text")
    assert (first.counts.completed, first.counts.failed) == (8, 2)
    # If they run again, in a request of their own,
    again = tables.run("in.jsonl", "out.jsonl", task="embed", column="text", retry_errors=True)
    # I expect the other answers to stay.
    assert (again.round, again.counts.completed, again.counts.failed) == (2, 8, 2)
    assert tables.plant.ledger("5.2-8.2x2", again.id)
    found = read_jsonl(tables.folder / "out.jsonl")
    assert [row["n"] for row in found] == list(range(10))
    assert [row["n"] for row in found if row["embedding_error"]] == [4, 7]
    assert found[4]["embedding_error"].startswith("INVALID_REQUEST: inputs[0]: has 9000 tokens")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"task": "embed"}, "task: needs a table: give column, prompt or message as well"),
        ({"into": "x"}, "into: needs a table"),
        ({"column": "text", "prompt": "{text}"}, "prompt: give only one of column, prompt"),
        ({"column": "words"}, "has no column 'words'; its columns: n, text"),
        ({"prompt": "{words}"}, "has no column 'words'"),
        ({"prompt": "words"}, "prompt: names no column"),
        ({"prompt": "{text.__class__}"}, "has no column 'text.__class__'"),
        ({"prompt": "{text!r}"}, "prompt: write a column as {name}"),
        ({"prompt": "{} {text}"}, "prompt: write a column as {name}"),
        ({"prompt": "{text"}, "prompt: expected '}' before end of string"),
        ({"column": "text", "errors": "e.jsonl.gz"}, "errors: e.jsonl.gz must not be compressed"),
        ({"prompt": "{text}", "image": "n"}, "image: goes with a message"),
        ({"image": "n"}, "image: needs a table"),
        ({"message": "{text}", "task": "embed"}, "message: embed takes no chat"),
        ({"column": "text", "task": "score"}, "task: use one of generate, embed, "),
        ({"column": "text", "params": {"n": 2}}, "n: a row of a table gets one answer"),
        ({"column": "text", "into": "n"}, "has a column 'n' already: choose --into"),
    ],
)
def test_what_cannot_be_run(tables: Tables, options: dict[str, Any], fault: str) -> None:
    write_csv(tables.folder / "in.csv", texts(2))
    with pytest.raises(SettingsError) as error:
        tables.run("in.csv", "out.csv", **options)
    assert fault in str(error.value)
    assert [path.name for path in tables.folder.iterdir()] == ["in.csv"]


@pytest.mark.parametrize(
    ("source", "target", "text", "fault"),
    [
        ("in.csv", "out.jsonl", "a\n1\n", "must be Parquet, or have the format of in.csv"),
        ("in.csv", "out", "a\n1\n", "must be Parquet, or have the format"),
        ("in.txt", "out.csv", "a\n1\n", "a table is a file .parquet"),
        ("in.csv", "out.csv", "", "is empty; a table begins with a header"),
        ("in.csv", "out.csv", "a,a\n1,2\n", "two columns have the same name"),
        ("in.csv", "out.csv", "a,b\n1,2\n1\n", "ends in line 3 has 1 fields, and the header 2"),
        ("in.csv", "out.csv", 'a,b\n1,"2\n', "unexpected end of data"),
        ("in.csv", "out.csv", "a\n\udcff\n", "can't decode byte 0xff"),
        pytest.param("in.parquet", "out.parquet", "PAR1", "in.parquet: ", marks=parquet),
        ("gone.csv", "out.csv", None, "No such file"),
        ("empty", "out", None, "empty: has no file .parquet"),
    ],
)
def test_what_is_no_table(
    tables: Tables, source: str, target: str, text: str | None, fault: str
) -> None:
    (tables.folder / "empty").mkdir()
    if text is not None:
        (tables.folder / source).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises((SettingsError, UnreadableFile), match=fault):
        tables.run(source, target, column="a")


def test_a_dry_run_reads_a_table(tables: Tables) -> None:
    write_csv(tables.folder / "in.csv", [*texts(3), {"n": 4, "text": ""}])
    found = batch(
        tables.plant, "run", tables.folder / "in.csv", "--dry-run", "--task", "embed",
        "--column", "text",
    )  # fmt: skip
    assert found.returncode == Exit.FAILED
    assert "4 lines: 3 valid (3 row), 1 invalid" in found.stdout


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.parametrize("task", ["embed", "generate"])
def test_a_repeatedly_killed_job_answers_each_row_once(
    tables: Tables, tmp_path: Path, task: str
) -> None:
    # Given a job on a table of many rows, some of them bad
    rows = [
        {"n": number, "text": "" if number % 50 == 7 else f"row {number}"}
        for number in range(20_000)
    ]
    write_jsonl(tmp_path / "in.jsonl", rows)
    target = tmp_path / "out.jsonl"
    arguments = ("run", tmp_path / "in.jsonl", "-o", target, "--task", task, "--column", "text")
    results, kills = tmp_path / "out.jsonl.results.jsonl", 0
    # If its process is killed after each write
    for _ in range(5):
        process = start(tables.plant, tmp_path / "log", *arguments)
        size = bytes_of(results) + random.randrange(200_000)
        status = ended_when_larger(process, results, size)
        process.kill()
        process.wait()
        if status is not None:
            break
        kills += 1
    assert kills
    done = batch(tables.plant, *arguments)
    assert done.returncode == Exit.OK, done.stderr + (tmp_path / "log").read_text()
    # I expect all rows in their order, each with its own answer.
    state = load_state(tmp_path / "out.jsonl.state")
    assert state is not None
    assert (state.counts.completed, state.counts.failed) == (19_600, 400)
    column = {"embed": "embedding", "generate": "generated_text"}[task]
    found = read_jsonl(target)
    assert [row["n"] for row in found] == list(range(20_000))
    assert all((row[column] is None) == (row["n"] % 50 == 7) for row in found)
    if task == "embed":
        some = [0, 1, 9_999, 19_999]
        assert [found[at][column] for at in some] == tables.embedded(
            [str(rows[at]["text"]) for at in some]
        )
