"""`tokenyard audit`: what operators have done."""

from __future__ import annotations

from typing import Final

import click

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.options import json_list_option, limit_option
from tokenyard.cli.shared.tables import Column, Columns, show_list
from tokenyard.ops.audit import AuditEntry, read_audit
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.texts import local_time

_COLUMNS: Final[Columns[AuditEntry]] = {
    Column("Time", is_whole=True): lambda one: local_time(one.at_ms / 1000),
    Column("Who"): lambda one: one.who,
    Column("Action", is_whole=True): lambda one: one.action,
    Column("What happened"): lambda one: (
        f"refused: {one.error}" if one.error else one.text or one.target
    ),
    Column("Why"): lambda one: one.why,
}


@click.command(cls=PlainCommand, short_help="List what operators have done.")
@limit_option
@json_list_option("an entry")
@click.pass_context
def audit(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List what operators have done at the board and on the command line.

    The newest come first. The yard keeps about the last 10,000; commands that only read leave none.

    Examples:
      tokenyard audit
      tokenyard audit --limit 1000 --json
    """
    with opened(ctx.obj) as yard:
        entries = read_audit(yard, limit)
    below = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    show_list(entries, _COLUMNS, below, as_json=as_json)
