"""`tokenyard batch submit`: submit a file of requests to RQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from tokenyard.batch.files import UnreadableFile
from tokenyard.batch.state import DEFAULT_RETRIES
from tokenyard.cli.batch.options import (
    file_errors_in_one_line,
    need_rq,
    spec_options,
    whole_seconds,
)
from tokenyard.cli.shared.completion import COMPLETE
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import say
from tokenyard.process.program import PlainCommand, YardChoice


@click.command(cls=PlainCommand, short_help="Submit a file of requests to RQ.")
@spec_options
@click.option(
    "--retries",
    type=click.IntRange(0, 1000),
    default=DEFAULT_RETRIES,
    show_default=True,
    help="Retries after a failure, counted from the last progress.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=whole_seconds,
    metavar="TIME",
    default="0",
    help="Longest time of one try.  [default: no limit]",
)
@click.option(
    "--after",
    multiple=True,
    metavar="JOB",
    shell_complete=COMPLETE["batch"],
    help="Run when this job has completed.",
)
@click.option("--at", metavar="TIME", help="Run at this time: 2026-11-22T02:00, 02:00 or +90m.")
@click.option("--cron", default="", help="Run repeatedly: '0 2 * * *' is each night at two.")
@click.option("--on-success", default="", metavar="URL|COMMAND", help="Called when it completed.")
@click.option("--on-failure", default="", metavar="URL|COMMAND", help="Called when it failed.")
@click.option("--json", "as_json", is_flag=True, help="Print the job as one JSON object.")
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    input_path: Path,
    output: Path | None,
    at: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Submit a file of requests to RQ, and print the id of the job.

    `tokenyard batch worker` runs it, on any host that sees the files under the same paths.

    Examples:
      tokenyard batch submit in.jsonl -o out.jsonl
      tokenyard batch submit b.jsonl -o b-out.jsonl --after batch_0f3a...
      tokenyard batch submit in.jsonl -o out.jsonl --at 02:00 --completion-window 6h
      tokenyard batch submit in.jsonl -o 'out-%Y-%m-%d.jsonl' --cron '0 2 * * *'
      tokenyard batch submit in.jsonl -o out.jsonl --on-success https://example.org/done

    A command for --on-success or --on-failure runs on the worker's host, without a shell; it has
    the job as JSON on standard input, and in TOKENYARD_BATCH_ID, _STATUS, _OUTPUT and _ERRORS.
    """
    need_rq()
    from tokenyard.batch.rq.jobs import submit_batch
    from tokenyard.batch.rq.schedule import read_time

    choice: YardChoice = ctx.obj
    if output is None:
        raise click.UsageError("give --output")
    with file_errors_in_one_line(ctx):
        if not given["cron"] and not input_path.exists():
            raise UnreadableFile(f"{input_path}: there is no such file") from FileNotFoundError()
        job = submit_batch(
            input_path,
            output,
            redis_url=url_of(choice),
            yard=choice.yard,
            at=read_time(at) if at else None,
            **given,
        )
    say(msgspec.json.encode(job.status()) if as_json else job.id)
    if not job.has_worker:
        say(
            "No batch worker is there; the job waits until `tokenyard batch worker` runs.", err=True
        )
