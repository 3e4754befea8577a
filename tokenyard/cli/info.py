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

ABOUT: Final = """Show a yard: who leads, what waits, what each worker does.

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
    console.print(summary)
    if view.workers:
        console.print(_worker_table(view))


def _leader(view: YardView) -> str:
    if view.leader is None:
        return "nobody: nothing is dispatched until a coordinator runs"
    return (
        f"{view.leader.name} (epoch {view.leader.epoch}, lease {view.leader.lease_ms / 1000:.1f} s)"
    )


def _worker_table(view: YardView) -> Table:
    table = Table("Worker", "State", "Model", "Engine", "Host", "Pid", "Lane", "Lease")
    for worker in view.workers:
        table.add_row(*_worker_row(worker), style=None if worker.is_ready else "dim")
    return table


def _worker_row(worker: WorkerView) -> tuple[str, ...]:
    info = worker.info
    lease = f"{worker.lease_ms / 1000:.0f} s" if worker.lease_ms else "-"
    if info is None:
        return (worker.worker, worker.state, "-", "-", "-", "-", str(worker.lane), lease)
    engine = f"{info.engine} {info.engine_version}".strip()
    lane = f"{worker.lane} of {info.lane_limit}"
    return (
        worker.worker,
        worker.state,
        info.model,
        engine,
        info.host,
        str(info.pid),
        lane,
        lease,
    )
