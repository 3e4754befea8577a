"""`tokenyard info`: what goes on in a yard, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenyard.admin import WorkerView, YardView, read_yard
from tokenyard.cli.console import plain_console
from tokenyard.cli.interrupts import Interrupts
from tokenyard.cli.reach import opened, url_of
from tokenyard.cli.watching import watch
from tokenyard.connection import public_url
from tokenyard.look import Look, Looks, Rates
from tokenyard.program import Exit, PlainCommand, YardChoice
from tokenyard.worker_info import HostInfo, WorkerInfo

ABOUT: Final = """Show a yard: who leads, what waits, what each worker holds and how long that took.

With --interval it looks again and again, and shows how many requests and tokens are finished in
a second: it refreshes in a terminal, and elsewhere prints a block of lines, or with --json one
line, for each look. A broker that goes away meanwhile is waited for.

The exit status is 3 where no coordinator leads, so that a script can ask whether the yard works.

\b
Examples:
  tokenyard info
  tokenyard info --interval 2
  tokenyard --redis-url redis://broker:6379 --yard test info
  tokenyard info --json | jq .waiting
  tokenyard info --interval 10 --count 6 --json | jq .rates.yard.tokens_per_s
"""
Show = Callable[[RenderableType], None]


@click.command(cls=PlainCommand, help=ABOUT, short_help="Show what goes on in a yard.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, on one line.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    metavar="SECONDS",
    help="Look again and again, with such pauses between.",
)
@click.option(
    "--count", type=click.IntRange(1), help="With --interval: so many looks.  [default: no end]"
)
@click.pass_context
def info(ctx: click.Context, as_json: bool, interval: float | None, count: int | None) -> None:
    """Read the yard and print it."""
    if interval is None and count is not None:
        raise click.UsageError("--count goes with --interval")
    choice: YardChoice = ctx.obj
    if interval is not None:
        ctx.exit(_follow(choice, interval, count or 0, as_json=as_json))
    with opened(choice) as (connection, keys):
        view = read_yard(connection, keys)
    if as_json:
        click.echo(view.as_json())
    else:
        plain_console().print(_picture(view, url_of(choice)))
    ctx.exit(Exit.OK if view.leader else Exit.UNAVAILABLE)


def _follow(choice: YardChoice, interval_s: float, count: int, *, as_json: bool) -> Exit:
    """Look until the count is reached or somebody interrupts; the status of the last look."""
    looks, url, status = Looks(), url_of(choice), Exit.OK

    def pause() -> bool:
        time.sleep(interval_s)
        return True

    try:
        with Interrupts(), _shown(plain_console(), is_live=not as_json) as show:
            for seen in watch(url, choice.yard, pause, count):
                if not isinstance(seen, Look):
                    status = Exit.UNAVAILABLE
                    click.echo(f"{seen}; trying again", err=True)
                    continue
                looks.add(seen)
                status = Exit.OK if seen.view.leader else Exit.UNAVAILABLE
                if as_json:
                    click.echo(_line(seen, looks.rates()))
                else:
                    show(_picture(seen.view, url, looks.rates()))
    except KeyboardInterrupt:
        return Exit.OK
    return status


def _line(look: Look, rates: Rates | None) -> bytes:
    """A look as one line of JSON: that of `info --json`, with what only several looks can say."""
    more = {"at_ms": look.at_ms, "oldest_ms": look.oldest_ms, "rates": rates}
    return msgspec.json.encode({**msgspec.to_builtins(look.view), **more})


@contextmanager
def _shown(console: Console, *, is_live: bool) -> Iterator[Show]:
    """In a terminal each picture takes the place of the one before."""
    if not (is_live and console.is_terminal):
        yield lambda picture: console.print(picture, Text())
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda picture: live.update(picture, refresh=True)


def _picture(view: YardView, url: str, rates: Rates | None = None) -> RenderableType:
    summary = Table.grid(padding=(0, 2))
    summary.add_row("Yard", f"{view.yard} at {public_url(url)}")
    summary.add_row("Leader", leader(view))
    waiting = ", ".join(f"{count} {name}" for name, count in view.waiting.items())
    summary.add_row("Waiting", waiting)
    if rates is not None:
        summary.add_row("Rates", pace(rates))
    summary.add_row("Dead letters", str(view.dead))
    models = ", ".join(f"{model} ({count} workers)" for model, count in view.models.items())
    summary.add_row("Models", models or "none: no worker is ready")
    if held := held_back(view):
        summary.add_row("Not running", held)
    for host in view.hosts:
        summary.add_row("Loadable", _loadable(host))
    return Group(summary, _worker_table(view)) if view.workers else summary


def held_back(view: YardView) -> str:
    """The scopes that operators have paused or suspended, in words."""
    return ", ".join(
        f"{scope} {posture.conduct}"
        for scope, posture in sorted(view.postures.by_scope.items())
        if posture.conduct != "RUNNING"
    )


def pace(rates: Rates) -> str:
    """How fast a yard is, in words."""
    ttft = f", {rates.ttft_ms:,.0f} ms to the first token" if rates.ttft_ms is not None else ""
    done = f"{rates.yard.requests_per_s:,.1f} requests/s, {rates.yard.tokens_per_s:,.0f} tokens/s"
    return done + ttft


def leader(view: YardView) -> str:
    """Who leads a yard, in words."""
    if view.leader is None:
        return "nobody: nothing is dispatched until a coordinator runs"
    return (
        f"{view.leader.name} (epoch {view.leader.epoch}, lease {view.leader.lease_ms / 1000:.1f} s)"
    )


def _loadable(host: HostInfo) -> str:
    """What a host may load, and what it could not."""
    return f"{host.name}: " + ", ".join(
        f"{model.name} (cannot be loaded: {model.fault})" if model.fault else model.name
        for model in host.models
    )


def _worker_table(view: YardView) -> Table:
    table = Table()
    table.add_column("Worker", no_wrap=True)
    for column in ("Device", "State", "Model", "Pid", "Lane", "Lease", "Memory", "Took"):
        table.add_column(column)
    for worker in view.workers:
        table.add_row(*_worker_row(worker), style=None if worker.is_ready else "dim")
    return table


def _worker_row(worker: WorkerView) -> tuple[str, ...]:
    info = worker.info
    lease = f"{worker.lease_ms / 1000:.0f} s" if worker.lease_ms else "-"
    if info is None:
        return (worker.worker, "-", worker.state, "-", "-", str(worker.lane), lease, "-", "-")
    return (
        worker.worker,
        f"{info.host} {info.device}",
        standing(worker),
        _held(info),
        str(info.pid),
        f"{worker.lane} of {info.lane_limit}" if info.state == "ready" else str(worker.lane),
        lease,
        f"{info.memory_bytes / 2**20:,.0f} MiB" if info.memory_bytes else "-",
        _phases(info),
    )


def standing(worker: WorkerView) -> str:
    """The state of a worker, and its conduct where that is not the usual one."""
    return worker.state if worker.conduct == "RUNNING" else f"{worker.state}, {worker.conduct}"


def _held(info: WorkerInfo) -> str:
    """The model that it holds, what it serves beside, and with whom."""
    parts = [info.model or "-"]
    if info.adapters:
        parts.append(f"with {', '.join(info.adapters)}")
    if info.group:
        parts.append(f"on {len(info.group)} devices, led by {info.group[0]}")
    return " ".join(parts)


def _phases(info: WorkerInfo) -> str:
    """How long it took to come into this state, phase by phase."""
    took = [f"{phase} {seconds:.2f}" for phase, seconds in info.phases_s.items()]
    total = sum(info.phases_s.values())
    return f"{total:.2f} s ({', '.join(took)})" if took else "-"
