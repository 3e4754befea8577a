"""`tokenyard dead`: list, show, requeue or delete dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import click
import msgspec
from rich.table import Table

from tokenyard.admin.dead_letters import (
    DeadLetter,
    all_letters,
    dead_letters,
    drop_letter,
    find_letter,
    requeue_letter,
)
from tokenyard.admin.letter_changes import obstacles
from tokenyard.cli.shared.auditing import noting
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, print_list, say
from tokenyard.cli.shared.tables import Column, FittingTable, sheet
from tokenyard.process.program import Exit, PlainCommand, PlainGroup
from tokenyard.protocol.texts import counted, local_time, printable
from tokenyard.protocol.yard import Yard

ABOUT: Final = """Dead letters: failed requests that are kept whole.

A request becomes a dead letter if it crashed its worker while it ran alone (POISONED), failed
repeatedly on an engine (INFERENCE_ERROR), or lost its worker in a stream with n above 1
(WORKER_LOST); its client has the failed result. So does an entry without a client that could be
answered, or with the id of another request (ID_REUSED).

LETTER is a name from `tokenyard dead list`, or the id of the request.

\b
Examples:
  tokenyard dead list
  tokenyard dead show 1763700000000-0
  tokenyard dead requeue 1763700000000-0
  tokenyard dead requeue --all
  tokenyard dead drop q7
"""
_COLUMNS: Final = (
    Column("Letter", is_whole=True),
    Column("Request", is_whole=True),
    Column("Model"),
    Column("Died", is_whole=True),
    Column("Reason"),
)
_letters = click.argument("names", metavar="LETTER...", nargs=-1)
_all = click.option("--all", "takes_all", is_flag=True, help="All dead letters.")


def _json(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--json", "as_json", is_flag=True, help=f"Print one JSON {what}.")


@click.group(
    cls=PlainGroup,
    help=ABOUT,
    short_help="List, show, requeue or delete dead letters.",
)
def dead() -> None:
    """The group; its commands do the work."""


@dead.command("list", cls=PlainCommand, short_help="List them, the newest first.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most.")
@_json("array, a letter on each line")
@click.pass_context
def list_letters(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List the newest dead letters, the newest first."""
    with opened(ctx.obj) as yard:
        letters = dead_letters(yard, limit)
        total: Any = yard.connection.xlen(yard.keys.dead)
    if as_json:
        print_list(letters)
        return
    if letters:
        plain_console().print(_table(letters))
    say(f"{len(letters)} of {counted(total, 'dead letter')}")


@dead.command(cls=PlainCommand, short_help="Show one with all its fields.")
@click.argument("letter")
@_json("object")
@click.pass_context
def show(ctx: click.Context, letter: str, as_json: bool) -> None:
    """Show a dead letter with all its fields. LETTER is its name or the id of the request."""
    with opened(ctx.obj) as yard:
        found = find_letter(yard, letter)
    if found is None:
        say(f"Error: {_no_such(letter)}", err=True)
        ctx.exit(Exit.FAILED)
    if as_json:
        _echo_json(found)
    else:
        plain_console().print(_sheet(found))


@dead.command(cls=PlainCommand, short_help="Submit them again.")
@_letters
@_all
@_json("object for each letter")
@click.pass_context
def requeue(ctx: click.Context, names: tuple[str, ...], takes_all: bool, as_json: bool) -> None:
    """Submit the requests of dead letters again.

    They keep their ids, and new results replace the failed ones. An expired deadline stays expired.
    The exit status is 1 if a letter could not be requeued.
    """
    failed = False
    with (
        opened(ctx.obj) as yard,
        noting(yard, "dead.requeue", "dead letter", "requeued") as done,
    ):
        for name, letter in _chosen(yard, names, takes_all=takes_all):
            sid = requeue_letter(yard, letter) if letter else ""
            problem = "" if sid else _no_requeue(yard, name, letter)
            done.extend([letter.letter] if letter and sid else [])
            _say(name, letter, f"waits again as {sid}", problem, as_json, server_id=sid)
            failed = failed or bool(problem)
    ctx.exit(Exit.FAILED if failed else Exit.OK)


@dead.command(cls=PlainCommand, short_help="Delete them.")
@_letters
@_all
@_json("object for each letter")
@click.pass_context
def drop(ctx: click.Context, names: tuple[str, ...], takes_all: bool, as_json: bool) -> None:
    """Delete dead letters; the results of their requests stay until they expire.

    The exit status is 1 if there is no such letter.
    """
    failed = False
    with (
        opened(ctx.obj) as yard,
        noting(yard, "dead.drop", "dead letter", "dropped") as done,
    ):
        for name, letter in _chosen(yard, names, takes_all=takes_all):
            is_done = letter is not None and drop_letter(yard, letter)
            _say(name, letter, "dropped", "" if is_done else _no_such(name), as_json)
            done.extend([letter.letter] if letter and is_done else [])
            failed = failed or not is_done
    ctx.exit(Exit.FAILED if failed else Exit.OK)


def _chosen(
    yard: Yard, names: Iterable[str], *, takes_all: bool
) -> Iterator[tuple[str, DeadLetter | None]]:
    """The chosen letters, with the arguments that name them."""
    if bool(names) == takes_all:
        raise click.UsageError("name letters, or give --all")
    if takes_all:
        yield from ((letter.letter, letter) for letter in all_letters(yard))
    else:
        yield from ((name, find_letter(yard, name)) for name in names)


def _say(
    name: str,
    letter: DeadLetter | None,
    done: str,
    problem: str,
    as_json: bool,
    **more: str,
) -> None:
    """Print the outcome of one letter."""
    if as_json:
        found = (
            {"letter": letter.letter, "client": letter.client, "id": letter.id} if letter else {}
        )
        rest = {"error": problem} if problem else more
        say(msgspec.json.encode({"letter": name, **found, **rest}))
    elif problem:
        say(f"Error: {problem}", err=True)
    elif letter is not None:
        say(f"{letter.letter} ({_owner(letter)}): {done}")


def _no_such(name: str) -> str:
    return f"there is no dead letter {name!r}"


def _no_requeue(yard: Yard, name: str, letter: DeadLetter | None) -> str:
    if letter is None:
        return _no_such(name)
    if not letter.is_answerable:
        return f"{letter.letter} has no client that could be answered: {letter.reason}"
    [why] = obstacles(yard, [letter])
    return f"{letter.letter} cannot run again: {why}"


def _owner(letter: DeadLetter) -> str:
    return f"{letter.client}/{printable(letter.id)}" if letter.is_answerable else "unknown"


def _table(letters: Iterable[DeadLetter]) -> FittingTable:
    table = FittingTable(_COLUMNS)
    for letter in letters:
        died = local_time(letter.died_ms / 1000)
        reason = printable(letter.reason)
        table.add(letter.letter, _owner(letter), printable(letter.model) or "-", died, reason)
    return table


def _sheet(letter: DeadLetter) -> Table:
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


def _echo_json(letter: DeadLetter) -> None:
    say(msgspec.json.encode(letter))
