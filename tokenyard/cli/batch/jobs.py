"""`tokenyard batch list`, `status`, `cancel`, `resume`, `results`, `logs`: jobs at RQ."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
from rich.table import Table

from tokenyard import clock
from tokenyard.batch.files import UnreadableFile, open_text
from tokenyard.batch.state import Batch, BatchErrors
from tokenyard.cli.batch.options import file_errors_in_one_line, need_rq
from tokenyard.cli.shared.completion import complete_job
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import plain_console, print_list, say
from tokenyard.cli.shared.operating import command
from tokenyard.cli.shared.tables import Column, FittingTable, sheet
from tokenyard.ops import batches as ops
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.texts import counted, local_time, printable, span

if TYPE_CHECKING:
    from tokenyard.batch.rq.jobs import BatchQueue

_POLL_S: Final = 0.5
_COLUMNS: Final = (
    Column("Job", is_whole=True),
    Column("Status", is_whole=True),
    Column("Done", is_number=True),
    Column("Errors", is_number=True),
    Column("Age", is_number=True),
    Column("RQ", is_whole=True, is_detail=True),
    Column("Input", is_detail=True),
    Column("Output", is_detail=True),
)
_job = click.argument("job_id", metavar="JOB", shell_complete=complete_job)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


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


@click.command("list", cls=PlainCommand, short_help="List the jobs, the newest first.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most.")
@click.option("--verbose", is_flag=True, help="Show all columns.")
@_json
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
    if as_json:
        print_list(batches[:limit])
        return
    if batches:
        plain_console().print(_table(batches[:limit], is_whole=verbose))
    say(f"{len(batches[:limit])} of {counted(len(batches), 'batch job')}")


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
@_json
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


def _table(batches: Sequence[Batch], *, is_whole: bool) -> FittingTable:
    table = FittingTable(_COLUMNS, has_details=is_whole)
    now_s = clock.wall()
    for batch in batches:
        counts = batch.request_counts
        table.add(
            printable(batch.id),
            batch.status,
            f"{counts.done} of {counts.total}",
            str(counts.failed),
            span(1000 * (now_s - batch.created_at)) if batch.created_at else "-",
            str(batch.rq_status),
            printable(Path(batch.input_file_id).name),
            printable(Path(batch.output_file_id).name),
        )
    return table


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
