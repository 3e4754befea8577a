"""`tokenyard explain`: the timeline of a request."""

from __future__ import annotations

import click
import msgspec
from rich.table import Table

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.cli.shared.options import json_option
from tokenyard.cli.shared.request_owner import client_option, owner_of, request_id
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.texts import local_time, printable
from tokenyard.yard.timeline import Timeline, read_timeline


@click.command(cls=PlainCommand, short_help="Show the timeline of a request.")
@click.argument("request_id", metavar="ID", callback=request_id)
@client_option
@json_option
@click.pass_context
def explain(ctx: click.Context, request_id: str, client: str | None, as_json: bool) -> None:
    """Show the timeline of a request, until its result expires.

    When it was accepted, how long it waited and why, which worker it was assigned to and why, how
    each attempt ended, and its result. Times count from its acceptance, by the server's clock. If
    it waits for a pause, the operator, duration and reason of the pause are shown.

    Without --client, the client is `anon` if it has the id, else the only one that has. `tokenyard
    requests` lists the ids.

    Examples:
      tokenyard explain 6b1b2c9e-1
      tokenyard explain q1 --client ann
      tokenyard explain q1 --client ann --json | jq .attempts
      tokenyard explain plain-1              a request without a client of its own

    The exit status is 1 if the yard does not know the request or its result has expired, and 2 if
    the client is ambiguous or unknown: give --client then.
    """
    with opened(ctx.obj) as yard:
        owner = owner_of(yard, request_id, client)
        timeline = read_timeline(yard, owner, request_id)
    if as_json:
        events = msgspec.to_builtins(timeline.events())
        say(msgspec.json.encode({**msgspec.to_builtins(timeline), "events": events}))
        return
    say(f"{owner}/{printable(request_id)}: {_headline(timeline)}")
    plain_console().print(_table(timeline))


def _headline(timeline: Timeline) -> str:
    if timeline.accepted_ms is None:
        return timeline.state
    until_ms = timeline.ended_ms or timeline.now_ms
    took_s = (until_ms - timeline.accepted_ms) / 1000
    since = "after" if timeline.ended_ms else "for"
    accepted = local_time(timeline.accepted_ms / 1000, "milliseconds")
    return f"{timeline.state} {since} {took_s:.3f} s; accepted {accepted}"


def _table(timeline: Timeline) -> Table:
    events = timeline.events()
    start_ms = events[0].at_ms if events else 0
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for event in events:
        text = "\n".join(map(printable, event.text.splitlines()))
        table.add_row(f"{(event.at_ms - start_ms) / 1000:.3f} s", text)
    return table
