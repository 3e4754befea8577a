"""`tokenyard batch submit`, `list`, `status`, `cancel`, `resume`, `results`, `logs`: jobs at RQ."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from rich.table import Table

from tokenyard import clock
from tokenyard.batch.files import UnreadableFile, open_text
from tokenyard.batch.state import DEFAULT_RETRIES, Batch, BatchErrors
from tokenyard.cli.batch.options import (
    file_errors_in_one_line,
    need_rq,
    spec_options,
    whole_seconds,
)
from tokenyard.cli.completion import COMPLETE
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.cli.shared.operating import command
from tokenyard.cli.shared.options import json_list_option, json_option, limit_option, verbose_option
from tokenyard.cli.shared.tables import Column, Columns, sheet, show_list
from tokenyard.ops import batches as ops
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.texts import counted, local_time, span

if TYPE_CHECKING:
    from tokenyard.batch.rq.jobs import BatchQueue

_POLL_S: Final = 0.5
_COLUMNS: Final[Columns[Batch]] = {
    Column("Job", is_whole=True): lambda one: one.id,
    Column("Status", is_whole=True): lambda one: one.status,
    Column("Done", is_number=True): lambda one: (
        f"{one.request_counts.done} of {one.request_counts.total}"
    ),
    Column("Errors", is_number=True): lambda one: one.request_counts.failed,
    Column("Age", is_number=True): lambda one: (
        span(1000 * (clock.wall() - one.created_at)) if one.created_at else ""
    ),
    Column("RQ", is_whole=True, is_detail=True): lambda one: one.rq_status,
    Column("Input", is_detail=True): lambda one: Path(one.input_file_id).name,
    Column("Output", is_detail=True): lambda one: Path(one.output_file_id).name,
}
_job = click.argument("job_id", metavar="JOB", shell_complete=COMPLETE["batch"])


@contextmanager
def _queue(ctx: click.Context) -> Iterator[BatchQueue]:
    """The yard's queue of batch jobs; errors are printed in one line."""
    need_rq()
    from tokenyard.batch.rq.jobs import UnknownJob, batch_queue

    with file_errors_in_one_line(ctx, Exit.FAILED):
        try:
            with batch_queue(url_of(ctx.obj), ctx.obj.yard) as queue:
                yield queue
        except UnknownJob as error:
            say(f"Error: {error}", err=True)
            ctx.exit(Exit.FAILED)


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


@click.command("list", cls=PlainCommand, short_help="List the jobs, the newest first.")
@limit_option
@verbose_option
@json_list_option("a job")
@click.pass_context
def list_jobs(ctx: click.Context, limit: int, verbose: bool, as_json: bool) -> None:
    """List batch jobs, the newest first: waiting, running, scheduled and ended ones.

    Done counts the lines with an answer; Errors counts those among them that failed. A job in the
    queue that is no batch job is `foreign`; workers refuse it.
    """
    from tokenyard.batch.rq.listing import list_jobs as read_jobs

    with _queue(ctx) as queue:
        found = read_jobs(queue)
    own = sorted((job.batch for job in found.jobs), key=lambda one: one.created_at, reverse=True)
    foreign = [
        Batch(id=name, status="foreign", errors=BatchErrors.of(f"the job {why}"))
        for name, why in found.foreign.items()
    ]
    batches = [*own, *foreign]
    shown = batches[:limit]
    below = f"{len(shown)} of {counted(len(batches), 'batch job')}"
    show_list(shown, _COLUMNS, below, as_json=as_json, has_details=verbose)


@click.command(cls=PlainCommand, short_help="Show the status of a job.")
@_job
@click.option("--wait", is_flag=True, help="Wait until it is over.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.001),
    default=3600.0,
    show_default=True,
    help="Seconds to wait at most.",
)
@json_option
@click.pass_context
def status(ctx: click.Context, job_id: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Show the status of a batch job, in the terms of the OpenAI batch API.

    The exit status is 0 for a completed job or one in progress, 1 for one that failed, expired, was
    cancelled, has an error for every line or is unknown, and 4 if --wait timed out.
    """
    give_up = clock.monotonic() + timeout
    told = ""
    with _queue(ctx) as queue:
        from tokenyard.batch.rq.jobs import batch_of

        while True:
            job = queue.find(job_id)
            batch, waits_for = batch_of(job), queue.waits_for(job)
            if not wait or batch.is_over:
                break
            if waits_for != told and (told := waits_for):
                say(f"{job_id} waits for {told}", err=True)
            if clock.monotonic() >= give_up:
                break
            clock.sleep(_POLL_S)
    if as_json:
        say(msgspec.json.encode(msgspec.to_builtins(batch) | {"waits_for": waits_for}))
    else:
        plain_console().print(_sheet(batch, waits_for))
    if wait and not batch.is_over:
        ctx.exit(Exit.TIMEOUT)
    is_bad = batch.status != "completed" or batch.request_counts.has_only_errors
    ctx.exit(Exit.FAILED if batch.is_over and is_bad else Exit.OK)


cancel = command(ops.cancel, "cancel", "Cancel a job.", arguments=["job"])
resume = command(ops.resume, "resume", "Resume a job that ended early.", arguments=["job"])


@click.command(cls=PlainCommand, short_help="Print the results of a job, or its errors.")
@_job
@click.option("--errors", is_flag=True, help="Print the errors instead.")
@click.option("--path", "only_path", is_flag=True, help="Only print the path.")
@click.pass_context
def results(ctx: click.Context, job_id: str, errors: bool, only_path: bool) -> None:
    """Print the results of a batch job so far, decompressed.

    The files must be visible here under the same paths.
    """
    with _queue(ctx) as queue:
        spec = queue.find(job_id).order.spec
        path = spec.errors_path if errors else spec.output_path
        if only_path:
            say(str(path))
        else:
            _print_file(path)


@click.command(cls=PlainCommand, short_help="Print the log of a job.")
@_job
@click.pass_context
def logs(ctx: click.Context, job_id: str) -> None:
    """Print the log of a batch job: starts, errors and outcome.

    It is stored beside the output, as OUTPUT.log.
    """
    with _queue(ctx) as queue:
        _print_file(queue.find(job_id).order.spec.log_path)


def _print_file(path: Path) -> None:
    """Copy a file to standard output, without the torn end that a running job may leave."""
    try:
        with open_text(path) as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
    except FileNotFoundError as error:
        raise UnreadableFile(f"{path}: not there (yet, or not on this host)") from error
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror}") from error
    sys.stdout.buffer.flush()


def _sheet(batch: Batch, waits_for: str) -> Table:
    shown, counts = sheet(), batch.request_counts
    shown.add_row("Job", batch.id)
    shown.add_row("Status", f"{batch.status} (RQ: {batch.rq_status})")
    if waits_for:
        shown.add_row("Waits for", waits_for)
    shown.add_row("Lines", f"{counts.completed} + {counts.failed} errors of {counts.total}")
    if batch.usage:
        shown.add_row("Tokens", str(batch.usage))
    if batch.lines_per_s and not batch.is_over:
        eta = f", {batch.eta_s:.0f} s left" if batch.eta_s is not None else ""
        shown.add_row("Pace", f"{batch.lines_per_s} lines/s{eta}")
    if batch.message:
        shown.add_row("Error", batch.message)
    shown.add_row("Input", batch.input_file_id)
    shown.add_row("Results", batch.output_file_id)
    shown.add_row("Errors", batch.error_file_id)
    for name in ("created", "in_progress", "completed", "failed", "expired", "cancelled"):
        if at := getattr(batch, f"{name}_at"):
            shown.add_row(name.replace("_", " ").capitalize(), local_time(at))
    return shown
