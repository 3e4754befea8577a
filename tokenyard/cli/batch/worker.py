"""`tokenyard batch worker`: run submitted batch jobs."""

from __future__ import annotations

from typing import Final

import click
from setproctitle import setproctitle

from tokenyard.broker.connection import open_connection, translated
from tokenyard.cli.batch.options import need_rq
from tokenyard.cli.shared.connect import url_of
from tokenyard.process.program import PlainCommand, YardChoice, start_logging

ABOUT: Final = """Run batch jobs, one at a time; start several for more.

It is RQ's worker with JSON instead of pickle. Each job runs in its own process, which uses no GPU.
SIGTERM requeues a running job, and another worker continues it; after SIGKILL the next worker of
this host continues immediately, one elsewhere after a minute.

\b
Examples:
  tokenyard batch worker
  tokenyard batch worker --burst     until no job is left
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Run submitted jobs.")
@click.option("--burst", is_flag=True, help="End when no job waits.")
@click.option("--name", default="", help="Name of this worker in RQ.  [default: random]")
@click.pass_context
def worker(ctx: click.Context, burst: bool, name: str) -> None:
    """Work until stopped."""
    need_rq()
    from tokenyard.batch.rq.worker import run_worker

    choice: YardChoice = ctx.obj
    url = url_of(choice)
    start_logging(url, debug=choice.debug)
    setproctitle(f"tokenyard batch worker {choice.yard}")
    with translated(url), open_connection(url) as connection:
        connection.ping()
        run_worker(url, choice.yard, connection, name=name, burst=burst)
