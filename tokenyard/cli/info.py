"""`tokenyard info`: the state of a yard, once or at intervals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tokenyard import clock
from tokenyard.broker.connection import open_connection, translated
from tokenyard.broker.url import public_url
from tokenyard.cli.shared.connect import opened, url_of
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.cli.shared.options import verbose_option
from tokenyard.cli.shared.tables import Column, Columns, FittingTable, percent, sheet, table_of
from tokenyard.process.interrupted import Interrupts
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.control import ALL
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.texts import byte_size, counted, printable
from tokenyard.protocol.worker_info import HostInfo, WorkerInfo
from tokenyard.yard.history import Snapshot, SnapshotHistory, YardRates, read_snapshot
from tokenyard.yard.line import NOBODY, InLine, TenantLine, read_line
from tokenyard.yard.pauses import all_pauses
from tokenyard.yard.snapshot import WorkerView, YardView, read_yard

_MOST_TENANTS: Final = 10
LINE_COLUMNS: Final = ("Tenant in line", "Waiting", "Running", "Weight", "Wanted", "Had")
#: Requests that belong to no tenant share as one.
_NO_TENANT: Final = "(no tenant)"
#: Limits how long an unreachable broker freezes the picture.
_ANSWER_S: Final = 3.0
_CONNECT_S: Final = 2.0
Show = Callable[[RenderableType], None]


@click.command(cls=PlainCommand, short_help="Show the state of a yard.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, on one line.")
@click.option(
    "--interval", type=click.FloatRange(0.1), metavar="SECONDS", help="Refresh at this interval."
)
@click.option(
    "--count",
    type=click.IntRange(1),
    help="With --interval: number of snapshots.  [default: no end]",
)
@verbose_option
@click.pass_context
def info(
    ctx: click.Context, as_json: bool, interval: float | None, count: int | None, verbose: bool
) -> None:
    """Show a yard: its leader, waiting requests, pauses, tenants, and what workers hold.

    Columns that do not fit the terminal are left out. --verbose shows all: device, memory and lease
    of each worker, and the phases of loading its model.

    Of the tenants that wait, it shows the share of tokens that each should have, and with
    --interval the share that it had in the last minute; the next to be served is first.

    With --interval it looks again and again, and shows how many requests and tokens are finished in
    a second: it refreshes in a terminal, and elsewhere prints a block of lines, or with --json one
    line, for each snapshot. A broker that goes away meanwhile is waited for.

    The exit status is 3 if no coordinator leads, or the broker takes no writes, so that a script
    can check whether the yard works.

    Examples:
      tokenyard info
      tokenyard info --verbose
      tokenyard info --interval 2
      tokenyard --redis-url redis://broker:6379 --yard test info
      tokenyard info --json | jq .waiting
      tokenyard info --interval 10 --count 6 --json | jq .rates.yard.tokens_per_s
    """
    if interval is None and count is not None:
        raise click.UsageError("--count goes with --interval")
    choice: YardChoice = ctx.obj
    if interval is not None:
        ctx.exit(_follow(choice, interval, count or 0, as_json=as_json, is_whole=verbose))
    with opened(choice) as yard:
        view, line = read_yard(yard), read_line(yard)
    if as_json:
        say(_json(view, line, {}))
    else:
        plain_console().print(_picture(view, url_of(choice), line=line, is_whole=verbose))
    ctx.exit(Exit.OK if view.is_open else Exit.UNAVAILABLE)


def _follow(
    choice: YardChoice, interval_s: float, count: int, *, as_json: bool, is_whole: bool
) -> Exit:
    """Show snapshots until the count is reached or interrupted; the status of the last one."""
    history, url, status = SnapshotHistory(), url_of(choice), Exit.OK
    try:
        with Interrupts(), _shown(plain_console(), is_live=not as_json) as show:
            for seen in watch(url, choice.yard, lambda: clock.sleep(interval_s), count):
                if not isinstance(seen, Snapshot):
                    status = Exit.UNAVAILABLE
                    say(f"{seen}; trying again", err=True)
                    continue
                history.add(seen)
                status = Exit.OK if seen.view.is_open else Exit.UNAVAILABLE
                view, line = seen.view, seen.line
                rates, had = history.rates(), history.tenant_shares()
                if as_json:
                    say(_json(view, line, had, oldest_ms=seen.oldest_ms, rates=rates))
                else:
                    show(_picture(view, url, rates, line=line, had=had, is_whole=is_whole))
    except KeyboardInterrupt:
        return Exit.OK
    return status


def watch(
    url: str, yard: str, pause: Callable[[], object], count: int = 0
) -> Iterator[Snapshot | BrokerUnavailable]:
    """Snapshots of a yard, or why there is none now; the first one must succeed.

    ``pause`` waits between two of them, and ends it by returning True; so does their ``count``,
    unless it is 0. Raises what `translated` raises.
    """
    with open_connection(
        url, timeout_s=_ANSWER_S, connect_timeout_s=_CONNECT_S, retries=1
    ) as connection:
        for number in itertools.count(1):
            seen: Snapshot | BrokerUnavailable
            try:
                with translated(url):
                    seen = read_snapshot(Yard(connection, Keys(yard)))
            except BrokerUnavailable as error:
                if number == 1:
                    raise
                seen = error
            yield seen
            if number == count or pause():
                return


def _json(view: YardView, line: TenantLine, had: Mapping[str, float], **more: object) -> bytes:
    """A yard as one line; with ``--interval`` there are ``more`` fields."""
    wanted = line.wanted
    tenants = [
        {
            "name": one.name,
            "waiting": one.waiting,
            "running": one.running,
            "weight": one.settings.weight,
            "service": one.service,
            "wanted": wanted.get(one.name),
            "had": had.get(one.name),
        }
        for one in line.tenants
    ]
    told = {"waiting": line.waiting, "is_whole": line.is_whole, "tenants": tenants}
    return msgspec.json.encode({**msgspec.to_builtins(view), **more, "line": told})


@contextmanager
def _shown(console: Console, *, is_live: bool) -> Iterator[Show]:
    """In a terminal, each picture replaces the previous one."""
    if not (is_live and console.is_terminal):
        yield lambda picture: console.print(picture, Text())
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda picture: live.update(picture, refresh=True)


def _picture(
    view: YardView,
    url: str,
    rates: YardRates | None = None,
    *,
    line: TenantLine = NOBODY,
    had: Mapping[str, float] = MappingProxyType({}),
    is_whole: bool,
) -> Group:
    summary = sheet()
    summary.add_row("Yard", f"{view.yard} at {public_url(url)}")
    if view.broker_error:
        summary.add_row("Broker", Text(view.broker_error, style="bold red"))
    summary.add_row("Leader", leader(view))
    summary.add_row("Waiting", _waiting(view, line))
    if rates is not None:
        summary.add_row("Rates", pace(rates))
    summary.add_row("Dead letters", str(view.dead))
    models = ", ".join(
        f"{printable(name)} ({counted(count, 'worker')})" for name, count in view.models.items()
    )
    summary.add_row("Models", models or "none: no worker is ready")
    for number, pause in enumerate(all_pauses(view.desired_states)):
        summary.add_row("" if number else "Not running", pause.text(view.at_ms))
    for host in view.hosts:
        summary.add_row("Loadable", _loadable(host))
    for host in view.gone:
        summary.add_row("Not there", _loadable(host))
    parts: list[RenderableType] = [summary]
    if rows := line_rows(line, had, _MOST_TENANTS):
        parts += [Text(), _tenant_table(rows)]
    if view.workers:
        workers = table_of(
            view.workers,
            _COLUMNS,
            has_details=is_whole,
            style=lambda one: "" if one.is_ready else "dim",
        )
        parts += [Text(), workers]
    return Group(*parts)


def _waiting(view: YardView, line: TenantLine) -> str:
    waiting = ", ".join(f"{count} {name}" for name, count in view.waiting.items())
    waiting += f"; {line.waiting} of these of tenants" if line.waiting else ""
    is_held = not any(worker.is_serving for worker in view.workers) and any(
        worker.run_state != "RUNNING" for worker in view.workers
    )
    is_held = is_held or ALL in {pause.scope for pause in all_pauses(view.desired_states)}
    if any(view.waiting.values()) and is_held:
        return f"{waiting}: until the pause is over, see Not running"
    return waiting


def pace(rates: YardRates) -> str:
    """The rates of a yard in words."""
    ttft = f", {rates.ttft_ms:,.0f} ms to the first token" if rates.ttft_ms is not None else ""
    done = f"{rates.yard.requests_per_s:,.1f} requests/s, {rates.yard.tokens_per_s:,.0f} tokens/s"
    return done + ttft


def leader(view: YardView) -> str:
    """The leader of a yard in words."""
    if view.leader is None and view.broker_error:
        return "none, because the broker takes no writes"
    if view.leader is None:
        return "none: nothing is dispatched until a coordinator runs"
    return (
        f"{view.leader.name} (epoch {view.leader.epoch}, lease {view.leader.lease_ms / 1000:.1f} s)"
    )


def _loadable(host: HostInfo) -> str:
    """The models that a host may load, with their errors."""
    return f"{host.name}: " + ", ".join(
        printable(f"{model.name} (cannot be loaded: {model.fault})" if model.fault else model.name)
        for model in host.models
    )


def line_rows(line: TenantLine, had: Mapping[str, float], most: int) -> list[Sequence[str]]:
    """A row for each tenant, the next one first; the last counts those beyond ``most``."""
    shown = line.tenants if len(line.tenants) <= most else line.tenants[: most - 1]
    rows: list[Sequence[str]] = [_line_row(one, line.wanted, had) for one in shown]
    if left := len(line.tenants) - len(shown):
        beyond = "" if line.is_whole else " at least"
        rows.append((f"and{beyond} {left:,} more", *[""] * (len(LINE_COLUMNS) - 1)))
    return rows


def _line_row(one: InLine, wanted: Mapping[str, float], had: Mapping[str, float]) -> Sequence[str]:
    return (
        printable(one.name) or _NO_TENANT,
        f"{one.waiting:,}" if one.name else "-",
        f"{one.running:,}" if one.name else "-",
        f"{one.settings.weight:g}",
        percent(wanted.get(one.name)),
        percent(had.get(one.name)),
    )


def _tenant_table(rows: Sequence[Sequence[str]]) -> FittingTable:
    head, *counts = LINE_COLUMNS
    columns = (Column(head, is_whole=True), *(Column(name, is_number=True) for name in counts))
    return FittingTable(columns, [(row, "") for row in rows])


def state_text(worker: WorkerView) -> str:
    """The state of a worker, and its run state unless it is RUNNING."""
    return worker.state if worker.run_state == "RUNNING" else f"{worker.state}, {worker.run_state}"


def _held(info: WorkerInfo) -> str:
    """Its model, adapters and group."""
    parts = [info.model or "-"]
    if info.adapters:
        parts.append(f"with {', '.join(info.adapters)}")
    if info.group:
        parts.append(f"on {len(info.group)} devices, led by {info.group[0]}")
    return " ".join(parts)


def _phases(info: WorkerInfo) -> str:
    """The time to reach this state, by phase."""
    took = [f"{phase} {seconds:.2f}" for phase, seconds in info.phases_s.items()]
    total = sum(info.phases_s.values())
    return f"{total:.2f} s ({', '.join(took)})" if took else ""


def _lane(worker: WorkerView) -> str:
    if worker.info and worker.info.state == "ready":
        return f"{worker.lane} of {worker.info.lane_limit}"
    return str(worker.lane)


def _of_info(cell: Callable[[WorkerInfo], object]) -> Callable[[WorkerView], object]:
    """What a column says of a worker whose entry in the roster can be read."""
    return lambda worker: cell(worker.info) if worker.info else None


_COLUMNS: Final[Columns[WorkerView]] = {
    Column("Worker", is_whole=True): lambda one: one.worker,
    Column("State", is_whole=True): state_text,
    Column("Pid", is_number=True): _of_info(lambda info: str(info.pid)),
    Column("Model"): _of_info(_held),
    Column("Lane", is_whole=True): _lane,
    Column("Device", is_whole=True, is_detail=True): _of_info(
        lambda info: f"{info.host} {info.device}"
    ),
    Column("Memory", is_number=True, is_detail=True): _of_info(
        lambda info: byte_size(info.memory_bytes) if info.memory_bytes else ""
    ),
    Column("Lease", is_number=True, is_detail=True): lambda one: (
        f"{one.lease_ms / 1000:.0f} s" if one.lease_ms else ""
    ),
    Column("Took", is_detail=True): _of_info(_phases),
}
