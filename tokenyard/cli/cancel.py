"""`tokenyard cancel`: cancel requests in any state."""

from __future__ import annotations

import contextlib
from typing import Final

import click
import msgspec

from tokenyard.cli.shared.auditing import noting
from tokenyard.cli.shared.connect import opened, url_of
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.request_owner import client_option, owner_of, request_ids
from tokenyard.client.ledger import Cancellation
from tokenyard.client.sync import Client
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.texts import printable

ABOUT: Final = """Cancel requests, whether they wait or run.

A request gets its result, `cancelled`, immediately, with the tokens published so far, and its
worker stops it. A request that has ended keeps its result. An unknown id is cancelled before its
arrival: it gets the result `cancelled`, and the request does not run if it arrives later.

Without --client, the client is `anon` if it has the id, else the only one that has; an unknown id
is cancelled for `anon`. Nothing is cancelled before all clients are found.

\b
Examples:
  tokenyard cancel 6b1b2c9e-1
  tokenyard cancel q1 --client ann
  tokenyard cancel 7f3a-1 7f3a-2 --client batch --json
  tokenyard cancel plain-1               a request without a client of its own

\b
Exit statuses:
  0  all are cancelled
  1  a request had ended already
  2  the client of an id is ambiguous or unknown: give --client
  3  no broker
  4  a request moved each time: try again
"""
_SAID: Final = {
    Cancellation.CANCELLED: "cancelled",
    Cancellation.OVER: "had ended already",
    Cancellation.CANCELLED_BEFORE_ARRIVAL: "not known yet; it does not run if it arrives",
}


@click.command(cls=PlainCommand, help=ABOUT, short_help="Cancel requests in any state.")
@click.argument("ids", metavar="ID...", nargs=-1, required=True, callback=request_ids)
@client_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each request.")
@click.pass_context
def cancel(ctx: click.Context, ids: tuple[str, ...], client: str | None, as_json: bool) -> None:
    """Cancel each, print the outcome, and set the exit status."""
    choice: YardChoice = ctx.obj
    was_over = False
    with opened(choice) as yard, contextlib.ExitStack() as closing:
        owners = [owner_of(yard, each, client) for each in ids]
        noted = noting(yard, "request.cancel", "request", "cancelled")
        done = closing.enter_context(noted)
        # Not `with`, which needs a coordinator.
        callers = {name: Client(url_of(choice), choice.yard, name) for name in set(owners)}
        for caller in callers.values():
            closing.callback(caller.close)
        for owner, request_id in zip(owners, ids, strict=True):
            what = callers[owner].cancel(request_id)
            done.extend([] if what is Cancellation.OVER else [f"{owner}/{request_id}"])
            was_over = was_over or what is Cancellation.OVER
            if as_json:
                said = {"id": request_id, "client": owner, "cancel": what.value}
                say(msgspec.json.encode(said))
            else:
                say(f"{owner}/{printable(request_id)}: {_SAID[what]}")
    ctx.exit(Exit.FAILED if was_over else Exit.OK)
