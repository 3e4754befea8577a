"""`tokenyard batch run --dry-run`: check a file only."""

from __future__ import annotations

from typing import Final

from rich.table import Table

from tokenyard.batch.dry_run import Fleet, Report, as_json, dry_run
from tokenyard.batch.state import BatchSpec
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.client.tokenization import Tokenizer, load_tokenizer
from tokenyard.process.program import YardChoice
from tokenyard.protocol.errors import TokenyardError
from tokenyard.yard.snapshot import read_yard

_WIDEST_BAR: Final = 40


def check_file(choice: YardChoice, spec: BatchSpec, tokenizer: str, *, prints_json: bool) -> bool:
    """Read the file and print the report; whether every line is valid."""
    fleet = _fleet(choice)
    report = dry_run(spec, fleet, _tokenizer(tokenizer or fleet.tokenizer))
    if prints_json:
        say(as_json(report))
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


def _tokenizer(source: str) -> Tokenizer | None:
    return load_tokenizer(source) if source else None


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
