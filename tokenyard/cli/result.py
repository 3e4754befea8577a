"""`tokenyard result`: the result of a request that was submitted earlier."""

from __future__ import annotations

import time
from typing import Any, Final

import click
import redis

from tokenyard.cli.answers import Printer
from tokenyard.cli.reach import opened
from tokenyard.errors import WaitTimeout
from tokenyard.keys import Keys
from tokenyard.ledger import read_snapshots, snapshot_commands, unknown
from tokenyard.program import Exit, PlainCommand
from tokenyard.replies import Result, decode_reply, to_result
from tokenyard.wire import DEFAULT_CLIENT

ABOUT: Final = """Print the result of a request that was submitted earlier, by whomever.

It is read from the request's ledger, so it takes nothing away from the program that waits for it.
Where a program makes text out of tokens by itself, there are only the tokens here.

\b
Examples:
  tokenyard result q1 --client ann
  tokenyard result q1 --client ann --timeout 30 --json

\b
Exit statuses:
  0  the request completed
  1  it failed, was cancelled or has expired, or the yard does not know it
  3  no broker
  4  there is no result yet
"""
_LOOK_EVERY_S: Final = 0.1


@click.command(cls=PlainCommand, help=ABOUT, short_help="Print the result of an earlier request.")
@click.argument("request_id", metavar="ID")
@click.option(
    "--client", default=DEFAULT_CLIENT, show_default=True, help="Name that it was asked under."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds to wait for it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def result(ctx: click.Context, request_id: str, client: str, timeout: float, as_json: bool) -> None:
    """Look for the result, print it, and set the exit status."""
    printer = Printer(as_json=as_json)
    with opened(ctx.obj) as (connection, keys):
        found = _wait(connection, keys, client, request_id, timeout)
    printer.whole(found)
    ctx.exit(Exit.FAILED if printer.failed else Exit.OK)


def _wait(
    connection: redis.Redis, keys: Keys, client: str, request_id: str, timeout_s: float
) -> Result:
    """The result; raises `UnknownRequest`, or `WaitTimeout` where there is none in time."""
    give_up = time.monotonic() + timeout_s
    commands = snapshot_commands(keys, client, [request_id])
    while True:
        pipeline: Any = connection.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        [snapshot] = read_snapshots(pipeline.execute())
        if not snapshot.state:
            raise unknown(request_id)
        if snapshot.result is not None:
            return to_result(decode_reply(snapshot.result))
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            raise WaitTimeout(f"request {request_id!r} is {snapshot.state}: no result yet")
        time.sleep(min(_LOOK_EVERY_S, left_s))
