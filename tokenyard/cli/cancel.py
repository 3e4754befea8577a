"""`tokenyard cancel`: end requests, wherever they are."""

from __future__ import annotations

import contextlib
from typing import Final

import click
import msgspec

from tokenyard.cli.reach import url_of
from tokenyard.client import Client
from tokenyard.ledger import Cancellation
from tokenyard.program import Exit, PlainCommand, YardChoice
from tokenyard.wire import DEFAULT_CLIENT

ABOUT: Final = """Cancel requests, whether they wait or run.

A request has its result, `cancelled`, at once, with the tokens that were published, and its
worker is told. One that is over keeps its result. An id that the yard does not know is
forestalled: it has the result `cancelled`, and should the request still come, it is not run.

\b
Examples:
  tokenyard cancel q1 --client ann
  tokenyard cancel 7f3a-1 7f3a-2 --client batch --json
  tokenyard cancel plain-1               a request without a client of its own

\b
Exit statuses:
  0  all are cancelled             3  no broker
  1  a request was over already    4  a request moved all the time: try again
"""
_SAID: Final = {
    Cancellation.CANCELLED: "cancelled",
    Cancellation.OVER: "was over already",
    Cancellation.FORESTALLED: "not known here; should it come, it is not run",
}


@click.command(cls=PlainCommand, help=ABOUT, short_help="Cancel requests, wherever they are.")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--client", default=DEFAULT_CLIENT, show_default=True, help="Name that they were asked under."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each request.")
@click.pass_context
def cancel(ctx: click.Context, ids: tuple[str, ...], client: str, as_json: bool) -> None:
    """Cancel each, say what became of it, and set the exit status."""
    choice: YardChoice = ctx.obj
    was_over = False
    # Not `with`: a yard without a coordinator can be told to cancel, too.
    with contextlib.closing(Client(url_of(choice), choice.yard, client)) as caller:
        for request_id in ids:
            what = caller.cancel(request_id)
            was_over = was_over or what is Cancellation.OVER
            if as_json:
                said = {"id": request_id, "client": client, "cancel": what.value}
                click.echo(msgspec.json.encode(said))
            else:
                click.echo(f"{client}/{request_id}: {_SAID[what]}")
    ctx.exit(Exit.FAILED if was_over else Exit.OK)
