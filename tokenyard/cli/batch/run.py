"""`tokenyard batch run`: run a file of requests here."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column as RichColumn
from rich.table import Table

from tokenyard import clock
from tokenyard.batch.api import spec_of
from tokenyard.batch.dry_run import Fleet, Report, dry_run
from tokenyard.batch.runner import Runner
from tokenyard.batch.state import Batch, BatchSpec, BatchState, CodeCount, new_id
from tokenyard.cli.batch.options import file_errors_in_one_line, spec_options
from tokenyard.cli.shared.connect import opened, url_of
from tokenyard.cli.shared.console import HarmlessConsole, plain_console, say
from tokenyard.cli.shared.tables import Column, Columns, table_of
from tokenyard.client.tokenization import load_tokenizer
from tokenyard.process.interrupted import Interrupted, Interrupts
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.texts import counted
from tokenyard.yard.snapshot import read_yard

_SAY_EVERY_S: Final = 10.0
_ERROR_COLUMNS: Final[Columns[CodeCount]] = {
    Column("Code", is_whole=True): lambda one: one.code,
    Column("Lines", is_number=True): lambda one: one.lines,
    Column("First line", is_number=True): lambda one: str(one.first_line),
}
Tell = Callable[[Batch], None]


@click.command(cls=PlainCommand, short_help="Run a file of requests here.")
@spec_options
@click.option("--retry-errors", is_flag=True, help="Run lines with an error again, as corrected.")
@click.option("--dry-run", is_flag=True, help="Only check: invalid lines, tokens, an estimate.")
@click.option(
    "--tokenizer",
    default="",
    help="With --dry-run: folder or Hugging Face name.  [default: the yard's, if it is here]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the job as one JSON object.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    input_path: Path,
    output: Path | None,
    overwrite: bool,
    retry_errors: bool,
    dry_run: bool,
    tokenizer: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Run a file of requests, or a table, and write one answer for each line or row.

    It can be killed at any time: the same command continues where it stopped. The output files
    contain what is done; OUTPUT.state describes the job.

    Examples:
      tokenyard batch run in.jsonl -o out.jsonl
      tokenyard batch run in.jsonl -o out.jsonl --retry-errors     run failed lines again
      tokenyard batch run in.jsonl --dry-run                       only check the file
      tokenyard batch run rows.parquet -o out.parquet --task embed --column text

    Exit statuses:
      0  each line has its answer, result or error      3  no broker or no coordinator
      1  every line failed, expired, or the files cannot be used
      2  wrong usage
    """
    choice: YardChoice = ctx.obj
    if output is None and not dry_run:
        raise click.UsageError("give --output")
    spec = spec_of(input_path, output or "-", given)
    if dry_run:
        with file_errors_in_one_line(ctx):
            is_valid = check_file(choice, spec, tokenizer, prints_json=as_json)
        ctx.exit(Exit.OK if is_valid else Exit.FAILED)
    seen: list[Batch] = []
    with (
        file_errors_in_one_line(ctx),
        Interrupts(),
        _shown(HarmlessConsole(stderr=True, highlight=False)) as tell,
    ):

        def follow(batch: Batch) -> None:
            seen[:] = [batch]
            tell(batch)

        runner = Runner(url_of(choice), choice.yard, spec, on_progress=follow)
        try:
            retry = new_id() if retry_errors else ""
            state = runner.run(overwrite=overwrite, retry=retry)
        except Interrupted as signalled:
            counts = seen[0].request_counts if seen else None
            done = f" with {counts.done} of {counted(counts.total, 'line')} done" if counts else ""
            say(f"Stopped{done}; the same command continues from here.", err=True)
            ctx.exit(signalled.status)
    say(msgspec.json.encode(state.as_batch()) if as_json else summary(state))
    if state.line_errors and not as_json:
        plain_console().print(table_of(state.line_errors, _ERROR_COLUMNS))
    is_good = state.status == "completed" and not state.counts.has_only_errors
    ctx.exit(Exit.OK if is_good else Exit.FAILED)


def summary(state: BatchState) -> str:
    """The outcome of a job."""
    counts, spec = state.counts, state.spec
    results, errors = counted(counts.completed, "result"), counted(counts.failed, "error")
    sum_of = f"{counted(counts.total, 'input line')} = {results} + {errors}"
    lines = [f"{state.status}: {sum_of}", f"tokens:  {state.usage}", f"results: {spec.output}"]
    return "\n".join([*lines, f"errors:  {spec.errors_path}"] if counts.failed else lines)


@contextmanager
def _shown(console: Console) -> Iterator[Tell]:
    """A progress bar in a terminal; elsewhere a line from time to time."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=RichColumn(ratio=1)),  # gives way to the numbers
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("validating", total=None, pace="")

        def tell(batch: Batch) -> None:
            counts = batch.request_counts
            failed = f", {counted(counts.failed, 'error')}" if counts.failed else ""
            bar.update(
                task,
                description=batch.status,
                total=counts.total,
                completed=counts.done,
                pace=_pace(batch) + failed,
            )

        yield tell


def _lines(console: Console) -> Tell:
    """A line for each status, and one every ten seconds."""
    status, said_at = "", 0.0

    def tell(batch: Batch) -> None:
        nonlocal status, said_at
        now = clock.monotonic()
        if batch.status == status and now - said_at < _SAY_EVERY_S:
            return
        status, said_at = batch.status, now
        counts = batch.request_counts
        console.print(
            f"{batch.status}: {counts.done} of {counted(counts.total, 'line')},"
            f" {counted(counts.failed, 'error')}, {_pace(batch)}",
            markup=False,
        )

    return tell


def _pace(batch: Batch) -> str:
    pace = f"{batch.lines_per_s or 0.0:.1f} lines/s"
    if batch.eta_s is None:
        return pace
    return f"{pace}, {datetime.timedelta(seconds=int(batch.eta_s))} left"


# `tokenyard batch run --dry-run`: check a file only.

_WIDEST_BAR: Final = 40


def check_file(choice: YardChoice, spec: BatchSpec, tokenizer: str, *, prints_json: bool) -> bool:
    """Read the file and print the report; whether every line is valid."""
    fleet = _fleet(choice)
    source = tokenizer or fleet.tokenizer
    report = dry_run(spec, fleet, load_tokenizer(source) if source else None)
    if prints_json:
        say(msgspec.json.encode(report))
    else:
        _print(report)
    return not report.bad


def _fleet(choice: YardChoice) -> Fleet:
    """The properties of the yard; optional for a dry run."""
    try:
        with opened(choice) as yard:
            return Fleet.of(read_yard(yard))
    except TokenyardError as error:
        return Fleet(notes=[f"models, limits and pace are not known: {error}"])


def _print(report: Report) -> None:
    forms = ", ".join(f"{count} {form}" for form, count in sorted(report.forms.items()))
    say(f"{report.lines} lines: {report.good} valid ({forms}), {report.bad} invalid")
    for fault in report.faults:
        say(f"  line {fault.line}: {fault.code}: {fault.message}")
    if report.bad > len(report.faults):
        codes = ", ".join(f"{count} {code}" for code, count in sorted(report.codes.items()))
        say(f"  ... of all invalid lines: {codes}")
    tokens = report.tokens
    if tokens is not None and tokens.prompts:
        say(
            f"prompt tokens: {tokens.total} in {tokens.prompts} prompts,"
            f" {tokens.least} to {tokens.most}, {tokens.total / tokens.prompts:.1f} on average"
        )
        plain_console().print(_histogram(tokens.below))
    if report.most_new_tokens:
        say(f"new tokens: at most {report.most_new_tokens}, of lines with max_tokens")
    if report.estimate_s is not None:
        say(
            f"estimate: {report.estimate_s:.0f} s at {report.lines_per_s:g} lines/s,"
            " the rate of this yard when it was last busy"
        )
    for note in report.notes:
        say(f"note: {note}")


def _histogram(below: dict[int, int]) -> Table:
    table = Table.grid(padding=(0, 2))
    largest = max(below.values())
    for bound in sorted(below):
        bar = "#" * max(1, _WIDEST_BAR * below[bound] // largest)
        table.add_row(f"{bound // 2} to {bound - 1}", str(below[bound]), bar)
    return table
