"""Tables that fit any terminal width without cutting text off, and lists that may be JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from tokenyard.cli.shared.console import plain_console, print_list, say
from tokenyard.protocol.texts import printable

T = TypeVar("T")
_GAP: Final = 2
_INDENT: Final = 2
#: Least width of a text column; in a narrower terminal each row becomes a paragraph.
_LEAST_TEXT: Final = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    is_whole: bool = False  # never wrapped: ids, states, pids
    is_number: bool = False  # right-aligned and never wrapped
    is_detail: bool = False  # left out without room, the last one first


#: What the columns say of one thing: text, a whole number, a list of lines; None or "": nothing.
Columns = Mapping[Column, Callable[[T], object]]


@dataclass(slots=True)
class FittingTable:
    """A table; if its columns do not fit, a paragraph for each row.

    Columns with only "" or "-" are left out, except the first. With ``has_details`` no detail is
    left out.
    """

    columns: Sequence[Column]
    rows: Sequence[tuple[Sequence[str], str]]  # with their styles
    has_details: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        filled = [
            at
            for at in range(len(self.columns))
            if at == 0 or any(cells[at] not in {"", "-"} for cells, _ in self.rows)
        ]
        shown = filled.copy()
        while self._least_width(shown) > options.max_width:
            details = [at for at in shown if self.columns[at].is_detail]
            if self.has_details or not details:
                yield from self._paragraphs(filled, options.max_width)
                return
            shown.remove(details[-1])
        yield self._table(shown)

    def _least_width(self, shown: Sequence[int]) -> int:
        widths = (self._width(at) for at in shown)
        return sum(widths) + _GAP * (len(shown) - 1)

    def _width(self, at: int) -> int:
        """The least width of a column."""
        lines = [line for cells, _ in self.rows for line in cells[at].splitlines()]
        widest = max((cell_len(line) for line in (*lines, self.columns[at].name)), default=0)
        column = self.columns[at]
        return widest if column.is_whole or column.is_number else min(widest, _LEAST_TEXT)

    def _table(self, shown: Sequence[int]) -> Table:
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
        for at in shown:
            column = self.columns[at]
            table.add_column(
                column.name,
                justify="right" if column.is_number else "left",
                no_wrap=column.is_whole or column.is_number,
                overflow="fold",
            )
        for cells, style in self.rows:
            table.add_row(*(Text(cells[at]) for at in shown), style=style)
        return table

    def _paragraphs(self, shown: Sequence[int], width: int) -> Iterator[Text]:
        """The first cell as a heading, and the others with the names of their columns."""
        for cells, style in self.rows:
            for line in _folded([cells[shown[0]]], width, 0):
                yield Text(line, style=f"bold {style}".strip())
            items = [
                f"{self.columns[at].name.lower()} {line}"
                for at in shown[1:]
                if cells[at] not in {"", "-"}
                for line in cells[at].splitlines()
            ]
            for line in _folded(items, width, _INDENT):
                yield Text(line, style=style)


def _folded(items: Sequence[str], width: int, indent: int) -> Iterator[str]:
    """Items side by side as far as they fit; an item longer than a line is wrapped."""
    line = ""
    for item in items:
        joined = f"{line}{' ' * _GAP}{item}" if line else item
        if cell_len(joined) <= width - indent:
            line = joined
            continue
        if line:
            yield " " * indent + line
        *full, line = textwrap.wrap(item, max(1, width - indent), break_on_hyphens=False) or [""]
        yield from (" " * indent + one for one in full)
    if line:
        yield " " * indent + line


def table_of(
    things: Iterable[T],
    columns: Columns[T],
    *,
    has_details: bool = False,
    style: Callable[[T], str] = lambda _: "",
) -> FittingTable:
    """A row for each thing, with `printable` texts."""
    rows = [([_text(cell(one)) for cell in columns.values()], style(one)) for one in things]
    return FittingTable(tuple(columns), rows, has_details)


def _text(cell: object) -> str:
    if isinstance(cell, list):
        return "\n".join(map(printable, cell)) or "-"
    return f"{cell:,}" if isinstance(cell, int) else printable(str(cell or "")) or "-"


def show_list(
    things: Sequence[T],
    columns: Columns[T],
    below: str,
    *,
    as_json: bool,
    fields: Callable[[T], object] = lambda thing: thing,
    has_details: bool = False,
    style: Callable[[T], str] = lambda _: "",
) -> None:
    """Print the table, if it has rows, and the text below it; or the ``fields`` as a JSON array."""
    if as_json:
        print_list(map(fields, things))
        return
    if things:
        plain_console().print(table_of(things, columns, has_details=has_details, style=style))
    say(below)


def percent(share: float | None) -> str:
    """A share, if it is known."""
    return "-" if share is None else f"{share:.1%}"


def sheet() -> Table:
    """A table of names and values."""
    table = Table.grid(padding=(0, _GAP))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
