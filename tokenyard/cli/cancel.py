"""`tokenyard cancel`: end requests, wherever they are."""

from __future__ import annotations

import contextlib
from typing import Final

import click
import msgspec

from tokenyard.cli.shared.connect import opened, url_of
from tokenyard.cli.shared.console import say
from tokenyard.cli.whose import client_option, owner_of, request_ids
from tokenyard.client.ledger import Cancellation
from tokenyard.client.sync import Client
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.texts import printable

ABOUT: Final = """Cancel requests, whether they wait or run.

A request has its result, `cancelled`, at once, with the tokens that were published, and its
worker is told. One that is over keeps its result. An id that the yard does not know is
cancelled_before_arrival: it has the result `cancelled`, and is not run if it comes later.

Without --client each is that of `anon`, else of the only client that has the id, which is looked
for; an unknown id is cancelled for `anon`. Nothing is cancelled before all are found.

\b
Examples:
  tokenyard cancel 6b1b2c9e-1
  tokenyard cancel q1 --client ann
  tokenyard cancel 7f3a-1 7f3a-2 --client batch --json
  tokenyard cancel plain-1               a request without a client of its own

\b
Exit statuses:
  0  all are cancelled
  1  a request was over already
  2  several clients have an id, or it cannot be told: give --client
  3  no broker
  4  a request moved all the time: try again
"""
_SAID: Final = {
    Cancellation.CANCELLED: "cancelled",
    Cancellation.OVER: "was over already",
    Cancellation.CANCELLED_BEFORE_ARRIVAL: "not known here; should it come, it is not run",
}


@click.command(cls=PlainCommand, help=ABOUT, short_help="Cancel requests, wherever they are.")
@click.argument("ids", metavar="ID...", nargs=-1, required=True, callback=request_ids)
@client_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each request.")
@click.pass_context
def cancel(ctx: click.Context, ids: tuple[str, ...], client: str | None, as_json: bool) -> None:
    """Cancel each, say what became of it, and set the exit status."""
    choice: YardChoice = ctx.obj
    was_over = False
    with opened(choice) as (connection, keys):
        owners = [owner_of(connection, keys, each, client) for each in ids]
    with contextlib.ExitStack() as closing:
        # Not `with`: a yard without a coordinator can be told to cancel, too.
        callers = {name: Client(url_of(choice), choice.yard, name) for name in set(owners)}
        for caller in callers.values():
            closing.callback(caller.close)
        for owner, request_id in zip(owners, ids, strict=True):
            what = callers[owner].cancel(request_id)
            was_over = was_over or what is Cancellation.OVER
            if as_json:
                said = {"id": request_id, "client": owner, "cancel": what.value}
                say(msgspec.json.encode(said))
            else:
                say(f"{owner}/{printable(request_id)}: {_SAID[what]}")
    ctx.exit(Exit.FAILED if was_over else Exit.OK)
