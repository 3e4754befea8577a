"""Dead letters: failed requests that are kept whole.

A request becomes a dead letter if it crashed its worker while it ran alone (POISONED), failed
repeatedly on an engine (INFERENCE_ERROR), or lost its worker in a stream with n above 1
(WORKER_LOST); its client has the failed result. So does an entry without a client that could be
answered, or with the id of another request (ID_REUSED).

LETTER is a name from `tokenyard dead list`, or the id of the request.

Examples:
  tokenyard dead list
  tokenyard dead show 1763700000000-0
  tokenyard dead requeue 1763700000000-0
  tokenyard dead requeue --all
  tokenyard dead drop q7
"""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec
from rich.table import Table

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.cli.shared.operating import command
from tokenyard.cli.shared.options import json_list_option, json_option, limit_option
from tokenyard.cli.shared.tables import Column, Columns, sheet, show_list
from tokenyard.ops import letters as ops
from tokenyard.process.program import Exit, PlainCommand, PlainGroup
from tokenyard.protocol.texts import counted, local_time, printable
from tokenyard.yard.letters import WholeLetter, dead_letters, find_letter


def _owner(letter: WholeLetter) -> str:
    return f"{letter.client}/{printable(letter.id)}" if letter.is_answerable else "unknown"


_COLUMNS: Final[Columns[WholeLetter]] = {
    Column("Letter", is_whole=True): lambda one: one.letter,
    Column("Request", is_whole=True): _owner,
    Column("Model"): lambda one: one.model,
    Column("Died", is_whole=True): lambda one: local_time(one.died_ms / 1000),
    Column("Reason"): lambda one: one.reason,
}


@click.command("list", cls=PlainCommand, short_help="List them, the newest first.")
@limit_option
@json_list_option("a letter")
@click.pass_context
def list_letters(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List the newest dead letters, the newest first."""
    with opened(ctx.obj) as yard:
        letters = dead_letters(yard, limit)
        total: Any = yard.connection.xlen(yard.keys.dead)
    below = f"{len(letters)} of {counted(total, 'dead letter')}"
    show_list(letters, _COLUMNS, below, as_json=as_json)


@click.command(cls=PlainCommand, short_help="Show one with all its fields.")
@click.argument("letter")
@json_option
@click.pass_context
def show(ctx: click.Context, letter: str, as_json: bool) -> None:
    """Show a dead letter with all its fields. LETTER is its name or the id of the request."""
    with opened(ctx.obj) as yard:
        found = find_letter(yard, letter)
    if found is None:
        say(f"Error: there is no dead letter {letter!r}", err=True)
        ctx.exit(Exit.FAILED)
    if as_json:
        say(msgspec.json.encode(found))
    else:
        plain_console().print(_sheet(found))


def _sheet(letter: WholeLetter) -> Table:
    shown = sheet()
    shown.add_row("Letter", letter.letter)
    shown.add_row("Died", local_time(letter.died_ms / 1000))
    shown.add_row("Request", _owner(letter))
    shown.add_row("Server id", printable(letter.server_id))
    shown.add_row("Reason", _lines(letter.reason))
    for name, value in sorted(letter.fields.items()):
        shown.add_row(f"  {printable(name)}", _lines(value))
    return shown


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.splitlines()))


dead = PlainGroup(
    "dead",
    help=__doc__,
    short_help="List, show, requeue or delete dead letters.",
    commands=[
        list_letters,
        show,
        command(ops.requeue, "requeue", "Submit them again."),
        command(ops.drop, "drop", "Delete them."),
    ],
)
