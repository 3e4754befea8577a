"""`tokenyard info`: what goes on in a yard."""

from __future__ import annotations

from typing import Final

import click
from rich.console import Console
from rich.table import Table

from tokenyard.admin import WorkerView, YardView, read_yard
from tokenyard.cli.console import plain_console
from tokenyard.cli.reach import url_of
from tokenyard.connection import open_connection, public_url, translated
from tokenyard.keys import Keys
from tokenyard.program import Exit, PlainCommand, YardChoice
from tokenyard.worker_info import HostInfo, WorkerInfo

ABOUT: Final = """Show a yard: who leads, what waits, what each worker holds and how long that took.

The exit status is 3 where no coordinator leads, so that a script can ask whether the yard works.

\b
Examples:
  tokenyard info
  tokenyard --redis-url redis://broker:6379 --yard test info
  tokenyard info --json | jq .waiting
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Show what goes on in a yard.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def info(ctx: click.Context, as_json: bool) -> None:
    """Read the yard once and print it."""
    choice: YardChoice = ctx.obj
    url = url_of(choice)
    with translated(url), open_connection(url) as connection:
        view = read_yard(connection, Keys(choice.yard))
    if as_json:
        click.echo(view.as_json())
    else:
        _print(plain_console(), view, url)
    ctx.exit(Exit.OK if view.leader else Exit.UNAVAILABLE)


def _print(console: Console, view: YardView, url: str) -> None:
    summary = Table.grid(padding=(0, 2))
    summary.add_row("Yard", f"{view.yard} at {public_url(url)}")
    summary.add_row("Leader", _leader(view))
    waiting = ", ".join(f"{count} {name}" for name, count in view.waiting.items())
    summary.add_row("Waiting", waiting)
    summary.add_row("Dead letters", str(view.dead))
    models = ", ".join(f"{model} ({count} workers)" for model, count in view.models.items())
    summary.add_row("Models", models or "none: no worker is ready")
    for host in view.hosts:
        summary.add_row("Loadable", _loadable(host))
    console.print(summary)
    if view.workers:
        console.print(_worker_table(view))


def _leader(view: YardView) -> str:
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
    table = Table("Worker", "Device", "State", "Model", "Pid", "Lane", "Lease", "Memory", "Took")
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
        worker.state,
        _held(info),
        str(info.pid),
        f"{worker.lane} of {info.lane_limit}" if info.state == "ready" else str(worker.lane),
        lease,
        f"{info.memory_bytes / 2**20:,.0f} MiB" if info.memory_bytes else "-",
        _phases(info),
    )


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
