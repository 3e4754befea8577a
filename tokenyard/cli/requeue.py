"""`tokenyard requeue`: submit failed requests again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
import msgspec

from tokenyard.admin.dead_letters import DeadLetter, all_letters, requeue_letter
from tokenyard.admin.requeueing import what_is_in_the_way
from tokenyard.cli.shared.auditing import noting
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.request_owner import client_name, owner_of, request_ids
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.texts import printable
from tokenyard.protocol.wire import DEFAULT_CLIENT
from tokenyard.protocol.yard import Yard

ABOUT: Final = """Submit failed requests again.

They are taken from the dead letters and keep their ids; new results replace the failed ones.
`tokenyard dead requeue` does the same by the names of the letters. A failed request without a dead
letter was not kept: its input was invalid, or its engine refused it.

Without --client, the client is `anon` if it has the id, else the only one that has.

\b
Examples:
  tokenyard requeue q7 --client ann
  tokenyard requeue --all
  tokenyard requeue --all --client ann --json

The exit status is 1 if a request could not be requeued, and 2 if the client is ambiguous or
unknown: give --client then.
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Submit failed requests again.")
@click.argument("ids", metavar="ID...", nargs=-1, callback=request_ids)
@click.option("--all", "-a", "takes_all", is_flag=True, help="All dead letters.")
@click.option(
    "--client",
    callback=client_name,
    help=f"Client of the requests.  [default: {DEFAULT_CLIENT}, else the only one with the id;"
    " with --all: any]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each request.")
@click.pass_context
def requeue(
    ctx: click.Context, ids: tuple[str, ...], takes_all: bool, client: str | None, as_json: bool
) -> None:
    """Requeue each, print the outcome, and set the exit status."""
    if bool(ids) == takes_all:
        raise click.UsageError("name requests, or give --all")
    failed = False
    with (
        opened(ctx.obj) as yard,
        noting(yard, "request.requeue", "request", "requeued") as done,
    ):
        letters = _letters(yard, client)
        wanted = list(letters) if takes_all else [
            (_owner(yard, letters, each, client), each) for each in ids
        ]  # fmt: skip
        for owner, name in wanted:
            letter = letters.get((owner, name))
            sid = requeue_letter(yard, letter) if letter else ""
            problem = "" if sid else _problem(yard, owner, name)
            _say(owner, name, sid, problem, as_json=as_json)
            done.extend([f"{owner}/{name}"] if sid else [])
            failed = failed or bool(problem)
    ctx.exit(Exit.FAILED if failed else Exit.OK)


def _owner(
    yard: Yard,
    letters: Mapping[tuple[str, str], DeadLetter],
    request_id: str,
    client: str | None,
) -> str:
    """The client of a request: one with a dead letter, else any with the id."""
    owners = sorted(owner for owner, name in letters if name == request_id)
    if client is None and owners and (len(owners) == 1 or DEFAULT_CLIENT in owners):
        return DEFAULT_CLIENT if DEFAULT_CLIENT in owners else owners[0]
    return owner_of(yard, request_id, client)


def _letters(yard: Yard, client: str | None) -> dict[tuple[str, str], DeadLetter]:
    """The newest letter of each answerable request, by client and id."""

    def found() -> Iterator[DeadLetter]:
        for letter in all_letters(yard):
            if letter.is_answerable and client in {None, letter.client}:
                yield letter

    return {(letter.client, letter.id): letter for letter in found()}


def _problem(yard: Yard, client: str, request_id: str) -> str:
    state: Any = yard.connection.hget(yard.keys.ledger(client, request_id), "state")
    words = what_is_in_the_way((state or b"").decode(errors="replace"))
    return f"{client}/{printable(request_id)} {words}"


def _say(client: str, request_id: str, sid: str, problem: str, *, as_json: bool) -> None:
    if as_json:
        rest = {"error": problem} if problem else {"server_id": sid}
        say(msgspec.json.encode({"client": client, "id": request_id, **rest}))
    elif problem:
        say(f"Error: {problem}", err=True)
    else:
        say(f"{client}/{printable(request_id)}: waits again as {sid}")
