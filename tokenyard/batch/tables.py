"""Tables in, tables out: the rows of Parquet, CSV and JSONL files, or of a folder of such files.

A table is read a few thousand rows at a time, for its requests only the columns of the prompt. When
all rows have their answers, it is read once more and written with the answers beside its columns.
Parquet is read and written by pyarrow (the extra ``tables``), and its columns keep their types.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import string
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, ClassVar, Final, NamedTuple, cast

import msgspec
from msgspec import Struct

from tokenyard.batch.files import MAX_LINE_BYTES, UnreadableFile, open_text, read_lines, zstandard
from tokenyard.batch.lines import BadLine
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.parse import BadJson, ForeignJson

#: Rows in memory at once, and in a row group of a Parquet file that is written.
_CHUNK_ROWS: Final = 4096
_CHUNK_BYTES: Final = 16 * 1024 * 1024
_FLOAT_BYTES: Final = 4
#: Raised by libraries for the content of a file.
_BAD_CONTENT: Final = (ValueError, csv.Error, EOFError)

#: The values of some columns.
Row = Mapping[str, Any]


class RowAnswer(Struct, frozen=True):
    """The answer to a row: a text, or float32 numbers with their shape; or why it has none."""

    text: str | None = None
    data: bytes = b""
    shape: list[int] | None = None
    error: str | None = None

    @property
    def value(self) -> Any:
        """The text, or the numbers as lists in lists."""
        if self.shape is None:
            return self.text
        numbers: Any = list(struct.unpack(f"<{len(self.data) // _FLOAT_BYTES}f", self.data))
        for length in reversed(self.shape[1:]):
            numbers = [numbers[at : at + length] for at in range(0, len(numbers), length)]
        return numbers


class NewColumns(NamedTuple):
    """The columns that a table gets."""

    answer: str
    dimensions: int  # of the numbers of a row; 0: it is text

    @property
    def error(self) -> str:
        """The column of the errors."""
        return f"{self.answer}_error"

    @property
    def names(self) -> tuple[str, str]:
        """Both."""
        return self.answer, self.error

    def values(self, answer: RowAnswer) -> dict[str, Any]:
        """The values of both for a row."""
        return {self.answer: answer.value, self.error: answer.error}


Answers = Iterator[RowAnswer]


def table_files(path: Path) -> list[Path]:
    """The file, or all files of tables in a folder, by name.

    Raises `UnreadableFile` for a folder without any.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if _kind(file) and file.is_file())
    if not found:
        raise UnreadableFile(f"{path}: has no file {_SUFFIXES}")
    return found


def check_target(source: Path, target: Path) -> None:
    """Raises `SettingsError` where the output of a table cannot have this name."""
    kind = _kind(target)
    if source.is_dir() and kind is not None:
        raise SettingsError([f"output: {target} must be a folder, as the input is"])
    if not source.is_dir() and kind not in {_kind(source), ParquetTable}:
        raise SettingsError(
            [f"output: {target} must be Parquet, or have the format of {source.name}"]
        )
    if kind is ParquetTable:
        ParquetTable(target)


def check_columns(source: Path, columns: Iterable[str], new: NewColumns) -> None:
    """Raises `SettingsError` or `UnreadableFile` for a table that has not the right columns."""
    for file in table_files(source):
        names = table_of(file).names()
        missing = [name for name in columns if names and name not in names]
        if missing:
            raise SettingsError(
                [f"{file}: has no column {missing[0]!r}; its columns: {', '.join(names)}"]
            )
        for name in new.names:
            if name in names:
                raise SettingsError([f"{file}: has a column {name!r} already: choose --into"])


def table_of(path: Path) -> Table:
    """A file by its suffix; raises `SettingsError` for another suffix."""
    kind = _kind(path)
    if kind is None:
        raise SettingsError([f"{path}: a table is a file {_SUFFIXES}, or a folder of them"])
    return kind(path)


def count_rows(path: Path) -> int:
    """The rows of a table; raises `UnreadableFile`."""
    return sum(table_of(file).count() for file in table_files(path))


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row | BadLine]]:
    """The columns of all rows, numbered from 1; raises `UnreadableFile`."""
    files = (table_of(file) for file in table_files(path))
    return enumerate(itertools.chain.from_iterable(table.rows(columns) for table in files), 1)


def write_table(source: Path, target: Path, new: NewColumns, answers: Answers) -> None:
    """Write a table with the answers to its rows, in their order; replaces files atomically."""
    for file in table_files(source):
        path = target / file.relative_to(source) if source.is_dir() else target
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"new.{path.name}")
        try:
            with _errors_of(path):
                table_of(unfinished).write(table_of(file), new, answers)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror or error}") from error
    except _BAD_CONTENT as error:
        raise UnreadableFile(f"{path}: {error}") from error


class Table(ABC):
    """A file of rows."""

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> list[str]:
        """The columns; none where each row has its own. Raises `UnreadableFile`."""

    @abstractmethod
    def count(self) -> int:
        """How many rows it has; raises `UnreadableFile` where one cannot be kept."""

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterator[Row | BadLine]:
        """The values of these columns, row by row."""

    @abstractmethod
    def chunks(self) -> Iterator[Any]:
        """All columns as tables of pyarrow."""

    @abstractmethod
    def write(self, source: Table, new: NewColumns, answers: Answers) -> None:
        """Write a table of the same format, or of one that ``chunks`` can read."""


class ParquetTable(Table):
    """A Parquet file."""

    suffixes = (".parquet",)

    def __init__(self, path: Path) -> None:
        """Raises `ImportError` without the extra ``tables``."""
        super().__init__(path)
        import pyarrow  # noqa: F401 - whether it is there

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        from pyarrow import parquet

        # Without a buffer for whole row groups, which may be as large as the file.
        with _errors_of(self.path), parquet.ParquetFile(self.path, pre_buffer=False) as file:
            yield file

    def names(self) -> list[str]:
        """See `Table`."""
        with self._opened() as file:
            return list(file.schema_arrow.names)

    def count(self) -> int:
        """See `Table`."""
        with self._opened() as file:
            return int(file.metadata.num_rows)

    def rows(self, columns: Sequence[str]) -> Iterator[Row | BadLine]:
        """See `Table`."""
        with self._opened() as file:
            for batch in file.iter_batches(_rows_at_once(file), columns=list(columns)):
                yield from batch.to_pylist()

    def chunks(self) -> Iterator[Any]:
        """See `Table`."""
        import pyarrow

        with self._opened() as file:
            yield file.schema_arrow.empty_table()
            for batch in file.iter_batches(_rows_at_once(file)):
                yield pyarrow.Table.from_batches([batch])

    def write(self, source: Table, new: NewColumns, answers: Answers) -> None:
        """See `Table`."""
        import pyarrow
        from pyarrow import parquet

        writer: Any = None
        with contextlib.ExitStack() as stack:
            for chunk in source.chunks():
                some = list(itertools.islice(answers, len(chunk)))
                errors = pyarrow.array([one.error for one in some], pyarrow.string())
                whole = chunk.append_column(new.answer, _column(some, new.dimensions))
                whole = whole.append_column(new.error, errors)
                if writer is None:
                    writer = stack.enter_context(parquet.ParquetWriter(self.path, whole.schema))
                if len(whole):
                    writer.write_table(whole, row_group_size=len(whole))


def _rows_at_once(file: Any) -> int:
    """How many rows of a Parquet file are not too large for the memory."""
    groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
    widest = max((one.total_byte_size / max(1, one.num_rows) for one in groups), default=0)
    return max(1, min(_CHUNK_ROWS, int(_CHUNK_BYTES / max(1, widest))))


def _column(answers: Sequence[RowAnswer], dimensions: int) -> Any:
    """The answers to some rows as an array of pyarrow."""
    import pyarrow

    if not dimensions:
        return pyarrow.array([one.text for one in answers], pyarrow.string())
    data = b"".join(one.data for one in answers)
    count = len(data) // _FLOAT_BYTES
    column = pyarrow.Array.from_buffers(pyarrow.float32(), count, [None, pyarrow.py_buffer(data)])
    shapes = [one.shape for one in answers]
    if dimensions > 1:
        inner = [width for shape in shapes if shape for width in [shape[1]] * shape[0]]
        column = pyarrow.ListArray.from_arrays(list(accumulate(inner, initial=0)), column)
    outer = accumulate((shape[0] if shape else 0 for shape in shapes), initial=0)
    is_null = pyarrow.array([shape is None for shape in shapes], pyarrow.bool_())
    offsets = pyarrow.array(list(outer), pyarrow.int32())
    return pyarrow.ListArray.from_arrays(offsets, column, mask=is_null)


class TextTable(Table):
    """A file with a row as text, perhaps compressed."""

    @abstractmethod
    def records(self) -> Iterator[Row | BadLine]:
        """All rows, as they are written again."""

    @staticmethod
    def decoded(value: Any) -> Any:
        """A value of a record."""
        return value

    def count(self) -> int:
        """See `Table`."""
        return sum(1 for _ in self.records())

    def rows(self, columns: Sequence[str]) -> Iterator[Row | BadLine]:
        """See `Table`."""
        for record in self.records():
            yield (
                record
                if isinstance(record, BadLine)
                else {name: self.decoded(record[name]) for name in columns if name in record}
            )

    def chunks(self) -> Iterator[Any]:
        """See `Table`; the first rows decide which columns there are, and of which types.

        Raises ValueError for a later row that does not fit.
        """
        import pyarrow

        schema, done = None, 0
        records = self.records()
        while some := list(itertools.islice(records, _CHUNK_ROWS)):
            rows = [
                {}
                if isinstance(record, BadLine)
                else {name: self.decoded(value) for name, value in record.items()}
                for record in some
            ]
            if schema is None:
                names = dict.fromkeys(name for row in rows for name in row)
                rows[0] = dict.fromkeys(names) | rows[0]
                schema = pyarrow.Table.from_pylist(rows).schema
            for number, row in enumerate(rows, done + 1):
                if new := row.keys() - set(schema.names):
                    raise ValueError(
                        f"row {number} has a field {min(new)!r}, and none of the first"
                        f" {_CHUNK_ROWS} has it: choose an output in JSONL"
                    )
            done += len(rows)
            yield pyarrow.Table.from_pylist(rows, schema=schema)
        if schema is None:
            yield pyarrow.table({name: pyarrow.array([], "string") for name in self.names()})


class CsvTable(TextTable):
    """A CSV file with a header; all values are text."""

    suffixes = (".csv", ".csv.gz", ".csv.zst")

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Any]:
        csv.field_size_limit(MAX_LINE_BYTES)
        with (
            _errors_of(self.path),
            open_text(self.path) as file,
            io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
        ):
            yield csv.reader(text, strict=True)

    def names(self) -> list[str]:
        """See `Table`."""
        with self._reader() as reader:
            names: list[str] = next(reader, [])
        if not names:
            raise UnreadableFile(f"{self.path}: is empty; a table begins with a header")
        if len(set(names)) < len(names):
            raise UnreadableFile(f"{self.path}: two columns have the same name")
        return names

    def records(self) -> Iterator[Row | BadLine]:
        """See `TextTable`."""
        names = self.names()
        with self._reader() as reader:
            next(reader)
            for values in filter(None, reader):
                if len(values) != len(names):
                    raise ValueError(
                        f"the row that ends in line {reader.line_num} has {len(values)} fields,"
                        f" and the header {len(names)}"
                    )
                yield dict(zip(names, values, strict=True))

    def write(self, source: Table, new: NewColumns, answers: Answers) -> None:
        """See `Table`."""
        with _opened_for_writing(self.path) as file, io.TextIOWrapper(file, newline="") as text:
            writer = csv.writer(text)
            writer.writerow([*source.names(), *new.names])
            for record in cast(CsvTable, source).records():
                row = {**cast(Row, record), **new.values(next(answers))}
                writer.writerow(
                    msgspec.json.encode(value).decode() if isinstance(value, list) else value
                    for value in row.values()
                )


class JsonlTable(TextTable):
    """A file with a JSON object in each line; what is in it stays as it is written."""

    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst")
    _decode = ForeignJson[dict[str, msgspec.Raw]](dict[str, msgspec.Raw]).decode

    def names(self) -> list[str]:
        """See `Table`."""
        return []

    def records(self) -> Iterator[Row | BadLine]:
        """See `TextTable`."""
        for number, raw in read_lines(self.path):
            try:
                yield self._decode(raw or b"")
            except BadJson as error:
                message = "it is too long" if raw is None else str(error)
                yield BadLine(None, f"line {number} is not a JSON object: {message}", "invalid_row")

    @staticmethod
    def decoded(value: Any) -> Any:
        """See `TextTable`."""
        return msgspec.json.decode(value)

    def write(self, source: Table, new: NewColumns, answers: Answers) -> None:
        """See `Table`; a field of the input is never replaced."""
        with _opened_for_writing(self.path) as file:
            for record in cast(JsonlTable, source).records():
                row = {} if isinstance(record, BadLine) else dict(record)
                for name, value in new.values(next(answers)).items():
                    row.setdefault(name, value)
                file.write(msgspec.json.encode(row) + b"\n")


def _opened_for_writing(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "wb", compresslevel=6))
    if path.suffix == ".zst":
        return cast(IO[bytes], zstandard().open(path, "wb"))
    return path.open("wb")


_KINDS: Final[Sequence[type[Table]]] = (ParquetTable, CsvTable, JsonlTable)
_SUFFIXES: Final = ", ".join(suffix for kind in _KINDS for suffix in kind.suffixes)


def _kind(path: Path) -> type[Table] | None:
    return next((kind for kind in _KINDS if path.name.endswith(kind.suffixes)), None)


# Prompts made from the columns of a table: ``Summarize: {text}``.


@lru_cache(maxsize=16)
def _parts(template: str) -> Sequence[tuple[str, str | None, str | None, str | None]]:
    """Its texts, each with what follows in braces; every row of a table asks again."""
    return list(string.Formatter().parse(template))


def columns_of(template: str, *, may_be_none: bool = False) -> list[str]:
    """The names in the braces of a template; raises ValueError."""
    parts = _parts(template)
    names = [name for _, name, _, _ in parts if name is not None]
    if not all(names) or any(form or conversion for _, _, form, conversion in parts):
        raise ValueError("write a column as {name}, and a brace as {{ or }}")
    if not (names or may_be_none):
        raise ValueError("names no column: write one as {name}")
    return names


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """A template of `columns_of` with the values of its columns."""
    return "".join(
        text + ("" if name is None else values[name]) for text, name, _, _ in _parts(template)
    )
