"""`tokenyard result`: print the result of an earlier request."""

from __future__ import annotations

from typing import Any, Final, cast

import click

from tokenyard import clock
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.options import json_option
from tokenyard.cli.shared.printer import Printer
from tokenyard.cli.shared.request_owner import client_option, named, owner_of, request_id
from tokenyard.client.ledger import unknown
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.errors import WaitTimeout
from tokenyard.protocol.replies import Result, decode_reply, to_result
from tokenyard.protocol.yard import Yard

_POLL_S: Final = 0.1


@click.command(cls=PlainCommand, short_help="Print the result of an earlier request.")
@click.argument("request_id", metavar="ID", callback=request_id)
@client_option
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds to wait for it.",
)
@json_option
@click.pass_context
def result(
    ctx: click.Context, request_id: str, client: str | None, timeout: float, as_json: bool
) -> None:
    """Print the result of an earlier request of any client.

    It is read from the request's ledger, so the program that waits for it still receives it. If a
    program detokenizes itself, only the tokens are printed.

    Without --client, the client is `anon` if it has the id, else the only one that has.

    Examples:
      tokenyard result 6b1b2c9e-1
      tokenyard result q1 --client ann
      tokenyard result q1 --client ann --timeout 30 --json

    Exit statuses:
      0  the request completed
      1  it failed, was cancelled or has expired, or is unknown
      2  the client is ambiguous or unknown: give --client
      3  no broker
      4  there is no result yet
    """
    with opened(ctx.obj) as yard:
        owner = owner_of(yard, request_id, client)
        found = _wait(yard, owner, request_id, timeout)
    printer = Printer(owner, as_json=as_json)
    printer.result(found)
    printer.hint()
    ctx.exit(Exit.FAILED if printer.failed else Exit.OK)


def _wait(yard: Yard, client: str, request_id: str, timeout_s: float) -> Result:
    """The result; raises `UnknownRequest`, or `WaitTimeout` if there is none in time."""
    give_up = clock.monotonic() + timeout_s
    ledger, run = yard.keys.ledger(client, request_id), cast(Any, yard.connection)
    while True:
        state, packed = run.hmget(ledger, "state", "result")
        if not state:
            raise unknown(request_id)
        if packed is not None:
            return to_result(decode_reply(packed))
        left_s = give_up - clock.monotonic()
        if left_s <= 0:
            raise WaitTimeout(
                f"request {request_id!r} of client {client!r} is {state.decode()}: no result yet;"
                f" see tokenyard explain {named(client, request_id)}"
            )
        clock.sleep(min(_POLL_S, left_s))
