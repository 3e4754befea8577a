"""Renders one frame of `tokenyard top`, to fit a terminal."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenyard.cli.info import LINE_COLUMNS, leader, line_rows, pace, state_text
from tokenyard.protocol.keys import INTAKE_CLASSES
from tokenyard.protocol.texts import byte_size, counted, span
from tokenyard.yard.history import (
    RecentError,
    Snapshot,
    SnapshotHistory,
    Throughput,
    YardRates,
    recent_errors,
)
from tokenyard.yard.pauses import all_pauses
from tokenyard.yard.snapshot import WorkerView

_BARS: Final = " ▁▂▃▄▅▆▇█"
#: Lines outside of lists: title, summary, the queue with its header, the other headers.
_FIXED: Final = 11
_MOST_MODELS: Final = 4
_MOST_ERRORS: Final = 4
_MOST_PAUSES: Final = 3
_MOST_TENANTS: Final = 5
#: Columns of a terminal that has room for more of them.
_WIDE: Final = 110


def frame(
    history: SnapshotHistory, place: str, paper: ConsoleDimensions, error: str = ""
) -> RenderableType:
    """The whole frame, of any height if that of the paper is 0.

    ``error`` is shown if the last snapshot is old.
    """
    snapshot = history.last
    if snapshot is None:
        return Text(error)
    rates = history.rates()
    pauses = _pauses(snapshot)
    errors = recent_errors(snapshot.view, snapshot.letters)
    # Pauses take lines from the errors, not from the workers.
    errors = errors[: max(1, _MOST_ERRORS - len(pauses))]
    models = sorted({one.info.model for one in snapshot.view.workers if one.info} - {""})
    warning = f"The broker {snapshot.view.broker_error}" if snapshot.view.broker_error else ""
    told = bool(error) + -(-len(warning) // (paper.width - 10))
    tenants = line_rows(snapshot.line, history.tenant_shares(), _MOST_TENANTS)
    listed = min(len(models), _MOST_MODELS) + len(pauses) + (1 + len(tenants) if tenants else 0)
    room = _room_for_workers(paper, listed, len(errors), told)
    parts: list[RenderableType] = [_title(snapshot, place, paper)]
    if error:
        parts.append(Text(error, style="bold red", no_wrap=True, overflow="ellipsis"))
    if warning:
        parts.append(Text(warning, style="bold red"))
    parts += [
        _summary(snapshot, rates),
        _queue(history, snapshot, paper),
        *([_tenants(tenants)] if tenants else []),
        _workers(snapshot, rates, paper, room),
    ]
    if models:
        parts.append(_models(snapshot, rates, models[:_MOST_MODELS]))
    if errors:
        parts.append(_error_table(errors, snapshot))
    has_gaps = room is None or room >= len(snapshot.view.workers) + len(parts)
    if has_gaps:  # an empty line before each part but the first
        parts = [line for part in parts for line in (Text(), part)][1:]
    return Group(*parts)


def _room_for_workers(paper: ConsoleDimensions, listed: int, errors: int, told: int) -> int | None:
    """Lines for the list of workers; None: no limit."""
    if not paper.height:
        return None
    others = _FIXED + told + listed + (1 + errors if errors else 0)
    return max(1, paper.height - others)


def _title(snapshot: Snapshot, place: str, paper: ConsoleDimensions) -> RenderableType:
    at = datetime.datetime.fromtimestamp(snapshot.at_ms / 1000, datetime.UTC).astimezone()
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    keys = "  q quits" if paper.height else ""
    title.add_row(Text(f"tokenyard top - {place}", style="bold"), f"{at:%H:%M:%S}{keys}")
    return title


def _summary(snapshot: Snapshot, rates: YardRates | None) -> RenderableType:
    view = snapshot.view
    lines = Table.grid(padding=(0, 1), expand=True)
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    lines.add_row("Leader", Text(leader(view), style="" if view.leader else "bold red"))
    lines.add_row("Rates", pace(rates) if rates else "-")
    counts = (
        f"{view.ready_workers} of {counted(len(view.workers), 'worker')} ready,"
        f" {counted(view.dead, 'dead letter')}"
    )
    if snapshot.line.waiting:
        counts += f", {counted(snapshot.line.waiting, 'request')} of tenants waiting"
    lines.add_row("Yard", counts)
    for number, pause in enumerate(_pauses(snapshot)):
        lines.add_row("" if number else "Paused", Text(pause, style="yellow"))
    return lines


def _pauses(snapshot: Snapshot) -> list[str]:
    """A line for each pause, up to a limit."""
    pauses = [pause.text(snapshot.at_ms) for pause in all_pauses(snapshot.view.desired_states)]
    left = len(pauses) - _MOST_PAUSES
    return pauses if left <= 0 else [*pauses[: _MOST_PAUSES - 1], f"and {left + 1} more"]


def _table(*columns: str) -> Table:
    """A table without rules; numbers are right-aligned."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="reverse", expand=True)
    for column in columns:
        name, _, kind = column.partition(":")
        if kind == "number":
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if kind else None)
    return table


def _queue(
    history: SnapshotHistory, snapshot: Snapshot, paper: ConsoleDimensions
) -> RenderableType:
    table = _table("Intake", "Waiting:number", "Oldest:number", "History:wide")
    width = max(10, paper.width - 30)
    for name in INTAKE_CLASSES:
        waiting, oldest_ms = snapshot.view.waiting[name], snapshot.oldest_ms[name]
        depths = history.depths(name, width)
        table.add_row(
            name,
            f"{waiting:,}",
            span(oldest_ms) if waiting else "-",
            Text(bars(depths), style="cyan"),
            style="" if waiting else "dim",
        )
    return table


def _tenants(rows: Sequence[Sequence[str]]) -> RenderableType:
    head, *columns = LINE_COLUMNS
    table = _table(f"{head}:wide", *(f"{column}:number" for column in columns))
    for row in rows:
        table.add_row(*row)
    return table


def bars(depths: Sequence[int]) -> str:
    """The depths as a row of bars, the newest last."""
    highest = max([*depths, 1])
    last = len(_BARS) - 1
    return "".join(_BARS[-(-depth * last // highest)] for depth in depths)


def _workers(
    snapshot: Snapshot, rates: YardRates | None, paper: ConsoleDimensions, room: int | None
) -> RenderableType:
    columns = ["Worker", "State", "Model:wide", "Lane:number", "Tok/s:number", "TTFT:number"]
    if paper.width >= _WIDE:
        columns += ["Req/s:number", "Done:number", "Device"]
    columns += ["Memory:number"]
    table = _table(*columns)
    workers = snapshot.view.workers
    shown = workers if room is None or len(workers) <= room else workers[: max(1, room - 1)]
    for worker in shown:
        rate = rates.workers.get(worker.worker, Throughput()) if rates else Throughput()
        table.add_row(*_worker(worker, rate, paper), style="" if worker.is_ready else "dim")
    if not workers:
        table.add_row("none", style="dim")
    elif len(shown) < len(workers):
        table.add_row(f"and {len(workers) - len(shown)} more", style="dim")
    return table


def _worker(worker: WorkerView, rate: Throughput, paper: ConsoleDimensions) -> Iterator[str | Text]:
    info = worker.info
    yield worker.worker
    yield Text(state_text(worker), style=_STYLES.get(worker.state, "yellow"))
    yield (info.model if info else "") or "-"
    limit = f"/{info.lane_limit}" if info and worker.is_ready else ""
    yield f"{worker.lane}{limit}"
    yield f"{rate.tokens_per_s:,.0f}"
    yield _ms(info.tally.ttft_ms if info else None)
    if paper.width >= _WIDE:
        yield f"{rate.requests_per_s:,.1f}"
        yield f"{info.tally.finished:,}" if info else "-"
        yield f"{info.host} {info.device}" if info else "-"
    yield byte_size(info.memory_bytes) if info and info.memory_bytes else "-"


_STYLES: Final = {"ready": "green", "lost": "red", "failed": "red", "unreadable": "red"}


def _models(snapshot: Snapshot, rates: YardRates | None, models: Sequence[str]) -> RenderableType:
    table = _table("Model:wide", "Workers:number", "Lanes:number", "Tok/s:number", "Req/s:number")
    for model in models:
        holders = [one for one in snapshot.view.workers if one.info and one.info.model == model]
        rate = rates.models.get(model, Throughput()) if rates else Throughput()
        table.add_row(
            model,
            f"{sum(one.is_ready for one in holders)}/{len(holders)}",
            f"{sum(one.lane for one in holders):,}",
            f"{rate.tokens_per_s:,.0f}",
            f"{rate.requests_per_s:,.1f}",
        )
    return table


def _error_table(errors: Sequence[RecentError], snapshot: Snapshot) -> RenderableType:
    table = _table("Ago:number", "Last errors", "What:wide")
    for one in errors:
        text = " ".join(one.what.split())
        table.add_row(span(snapshot.at_ms - one.at_ms), one.where, Text(text, style="red"))
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"
