"""`tokenyard audit`: what operators have done."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, print_list, say
from tokenyard.cli.shared.tables import Column, FittingTable
from tokenyard.ops.audit import read_audit
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.texts import local_time, printable

ABOUT: Final = """List what operators have done at the board and on the command line.

The newest come first. The yard keeps about the last 10,000; commands that only read leave none.

\b
Examples:
  tokenyard audit
  tokenyard audit --limit 1000 --json
"""
_COLUMNS: Final = (
    Column("Time", is_whole=True),
    Column("Who"),
    Column("Action", is_whole=True),
    Column("What happened"),
    Column("Why"),
)


@click.command(cls=PlainCommand, help=ABOUT, short_help="List what operators have done.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON array, an entry on each line."
)
@click.pass_context
def audit(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List the newest entries, the newest first."""
    with opened(ctx.obj) as yard:
        entries = read_audit(yard, limit)
    if as_json:
        print_list(msgspec.to_builtins(entry) for entry in entries)
        return
    if entries:
        table = FittingTable(_COLUMNS)
        for entry in entries:
            told = f"refused: {entry.error}" if entry.error else entry.text or entry.target
            table.add(
                local_time(entry.at_ms / 1000),
                printable(entry.who),
                printable(entry.action),
                printable(told),
                printable(entry.why) or "-",
            )
        plain_console().print(table)
    say("1 entry" if len(entries) == 1 else f"{len(entries)} entries")
