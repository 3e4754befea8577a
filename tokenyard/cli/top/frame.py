"""One picture of `tokenyard top`: pure, from looks to lines that fit into a terminal."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenyard.admin.history import Look, Rate, Rates, SnapshotHistory
from tokenyard.admin.pauses import all_pauses
from tokenyard.admin.snapshot import WorkerView
from tokenyard.cli.info import leader, pace, standing
from tokenyard.protocol.keys import INTAKE_CLASSES
from tokenyard.protocol.texts import counted, span

_BARS: Final = " ▁▂▃▄▅▆▇█"
#: Lines of what is no list: title, summary, the queue with its header, the other headers.
_FIXED: Final = 11
_MOST_MODELS: Final = 4
_MOST_ERRORS: Final = 4
_MOST_PAUSES: Final = 3
_WIDE: Final = 110


@dataclass(frozen=True, slots=True)
class Paper:
    """How much room there is."""

    width: int
    height: int  # 0: no bound

    @property
    def is_wide(self) -> bool:
        """Whether there is room for more columns."""
        return self.width >= _WIDE


@dataclass(frozen=True, slots=True)
class Mishap:
    """Something that went wrong lately."""

    at_ms: int
    where: str
    what: str


def frame(looks: SnapshotHistory, place: str, paper: Paper, fault: str = "") -> RenderableType:
    """The whole picture; ``fault`` says why the last look is not of now."""
    look = looks.last
    if look is None:
        return Text(fault)
    rates = looks.rates()
    pauses = _pauses(look)
    mishaps = sorted(_mishaps(look), key=lambda one: one.at_ms, reverse=True)
    # What is paused takes its lines from the errors, not from the workers.
    mishaps = mishaps[: max(1, _MOST_ERRORS - len(pauses))]
    models = sorted({one.info.model for one in look.view.workers if one.info} - {""})
    warning = f"The broker {look.view.broker_error}" if look.view.broker_error else ""
    told = bool(fault) + -(-len(warning) // (paper.width - 10))
    listed = min(len(models), _MOST_MODELS) + len(pauses)
    room = _room_for_workers(paper, listed, len(mishaps), told)
    parts: list[RenderableType] = [_title(look, place, paper)]
    if fault:
        parts.append(Text(fault, style="bold red", no_wrap=True, overflow="ellipsis"))
    if warning:
        parts.append(Text(warning, style="bold red"))
    parts += [_summary(look, rates), _queue(looks, look, paper), _workers(look, rates, paper, room)]
    if models:
        parts.append(_models(look, rates, models[:_MOST_MODELS]))
    if mishaps:
        parts.append(_errors(mishaps, look))
    has_air = room is None or room >= len(look.view.workers) + len(parts)
    return Group(*(_with_air(parts) if has_air else parts))


def _with_air(parts: Sequence[RenderableType]) -> Iterator[RenderableType]:
    """An empty line before each part but the first."""
    for number, part in enumerate(parts):
        if number:
            yield Text()
        yield part


def _room_for_workers(paper: Paper, listed: int, mishaps: int, told: int) -> int | None:
    """Lines that the list of workers may have; None for as many as there are."""
    if not paper.height:
        return None
    others = _FIXED + told + listed + (1 + mishaps if mishaps else 0)
    return max(1, paper.height - others)


def _title(look: Look, place: str, paper: Paper) -> RenderableType:
    at = datetime.datetime.fromtimestamp(look.at_ms / 1000, datetime.UTC).astimezone()
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    keys = "  q quits" if paper.height else ""
    title.add_row(Text(f"tokenyard top - {place}", style="bold"), f"{at:%H:%M:%S}{keys}")
    return title


def _summary(look: Look, rates: Rates | None) -> RenderableType:
    view = look.view
    lines = Table.grid(padding=(0, 1), expand=True)
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    lines.add_row("Leader", Text(leader(view), style="" if view.leader else "bold red"))
    lines.add_row("Rates", pace(rates) if rates else "-")
    counts = (
        f"{view.ready_workers} of {counted(len(view.workers), 'worker')} ready,"
        f" {counted(view.dead, 'dead letter')}"
    )
    lines.add_row("Yard", counts)
    for number, pause in enumerate(_pauses(look)):
        lines.add_row("" if number else "Paused", Text(pause, style="yellow"))
    return lines


def _pauses(look: Look) -> list[str]:
    """A line for each scope that is held, within bounds."""
    pauses = [pause.text(look.at_ms) for pause in all_pauses(look.view.desired_states)]
    left = len(pauses) - _MOST_PAUSES
    return pauses if left <= 0 else [*pauses[: _MOST_PAUSES - 1], f"and {left + 1} more"]


def _table(*columns: str) -> Table:
    """A list without lines; numbers stand to the right."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="reverse", expand=True)
    for column in columns:
        name, _, kind = column.partition(":")
        if kind == "number":
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if kind else None)
    return table


def _queue(looks: SnapshotHistory, look: Look, paper: Paper) -> RenderableType:
    table = _table("Intake", "Waiting:number", "Oldest:number", "History:wide")
    width = max(10, paper.width - 30)
    for name in INTAKE_CLASSES:
        waiting, oldest_ms = look.view.waiting[name], look.oldest_ms[name]
        depths = looks.depths(name, width)
        table.add_row(
            name,
            f"{waiting:,}",
            span(oldest_ms) if waiting else "-",
            Text(history(depths), style="cyan"),
            style="" if waiting else "dim",
        )
    return table


def history(depths: Sequence[int]) -> str:
    """Bars as high as what waited, the newest last."""
    highest = max([*depths, 1])
    last = len(_BARS) - 1
    return "".join(_BARS[-(-depth * last // highest)] for depth in depths)


def _workers(look: Look, rates: Rates | None, paper: Paper, room: int | None) -> RenderableType:
    columns = ["Worker", "State", "Model:wide", "Lane:number", "Tok/s:number", "TTFT:number"]
    if paper.is_wide:
        columns += ["Req/s:number", "Done:number", "Device"]
    columns += ["Memory:number"]
    table = _table(*columns)
    workers = look.view.workers
    shown = workers if room is None or len(workers) <= room else workers[: max(1, room - 1)]
    for worker in shown:
        rate = rates.workers.get(worker.worker, Rate()) if rates else Rate()
        table.add_row(*_worker(worker, rate, paper), style="" if worker.is_ready else "dim")
    if not workers:
        table.add_row("none", style="dim")
    elif len(shown) < len(workers):
        table.add_row(f"and {len(workers) - len(shown)} more", style="dim")
    return table


def _worker(worker: WorkerView, rate: Rate, paper: Paper) -> Iterator[str | Text]:
    info = worker.info
    yield worker.worker
    yield Text(standing(worker), style=_STYLES.get(worker.state, "yellow"))
    yield (info.model if info else "") or "-"
    limit = f"/{info.lane_limit}" if info and worker.is_ready else ""
    yield f"{worker.lane}{limit}"
    yield f"{rate.tokens_per_s:,.0f}"
    yield _ms(info.tally.ttft_ms if info else None)
    if paper.is_wide:
        yield f"{rate.requests_per_s:,.1f}"
        yield f"{info.tally.finished:,}" if info else "-"
        yield f"{info.host} {info.device}" if info else "-"
    yield _memory(info.memory_bytes if info else 0)


_STYLES: Final = {"ready": "green", "lost": "red", "failed": "red", "unreadable": "red"}


def _models(look: Look, rates: Rates | None, models: Sequence[str]) -> RenderableType:
    table = _table("Model:wide", "Workers:number", "Lanes:number", "Tok/s:number", "Req/s:number")
    for model in models:
        holders = [one for one in look.view.workers if one.info and one.info.model == model]
        rate = rates.models.get(model, Rate()) if rates else Rate()
        table.add_row(
            model,
            f"{sum(one.is_ready for one in holders)}/{len(holders)}",
            f"{sum(one.lane for one in holders):,}",
            f"{rate.tokens_per_s:,.0f}",
            f"{rate.requests_per_s:,.1f}",
        )
    return table


def _mishaps(look: Look) -> Iterator[Mishap]:
    """Dead letters, deaths and faults of workers, and models that could not be loaded."""
    for letter in look.letters:
        yield Mishap(letter.died_ms, letter.id or letter.letter, f"dead letter: {letter.reason}")
    for worker in look.view.workers:
        if worker.info and worker.info.last_error:
            yield Mishap(worker.info.last_error_ms, worker.info.name, worker.info.last_error)
    for host in look.view.hosts:
        for model in host.models:
            if model.fault:
                yield Mishap(model.faulted_ms, host.name, f"{model.name}: {model.fault}")


def _errors(mishaps: Sequence[Mishap], look: Look) -> RenderableType:
    table = _table("Ago:number", "Last errors", "What:wide")
    for one in mishaps:
        text = " ".join(one.what.split())
        table.add_row(span(look.at_ms - one.at_ms), one.where, Text(text, style="red"))
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


def _memory(size: int) -> str:
    if not size:
        return "-"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
