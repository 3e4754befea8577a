"""`tokenyard requests`, `explain` and `result`: the list of requests, and what became of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import click
import msgspec
from rich.table import Table

from tokenyard import clock
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.cli.shared.options import (
    CommandT,
    json_list_option,
    json_option,
    milliseconds,
    name_option,
    verbose_option,
)
from tokenyard.cli.shared.printer import Printer
from tokenyard.cli.shared.request_owner import (
    client_name,
    client_option,
    named,
    owner_of,
    request_id,
)
from tokenyard.cli.shared.tables import Column, Columns, show_list
from tokenyard.client.ledger import unknown
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.errors import WaitTimeout
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.replies import Result, decode_reply, to_result
from tokenyard.protocol.texts import counted, local_time, printable, span
from tokenyard.yard.listing import Query, RequestList, list_requests
from tokenyard.yard.requests import STATES, Listed
from tokenyard.yard.timeline import Timeline, read_timeline

_NO_SCAN: Final = (
    "this user of Redis may not run SCAN, so ended requests cannot be listed"
    " (in deploy/users.acl, `admin` may)"
)


def _age_option(flag: str, name: str, bound: str) -> Callable[[CommandT], CommandT]:
    text = f"Only those of {bound} this age: 90s, 5m, 2h, 1d."
    return click.option(flag, name, metavar="TIME", type=milliseconds, default="0", help=text)


def _columns(now_ms: int) -> Columns[Listed]:
    return {
        Column("Id", is_whole=True): lambda one: one.id,
        Column("Client", is_whole=True): lambda one: one.client,
        Column("State", is_whole=True): lambda one: ", ".join(
            [one.state, *sorted({pause.run_state for pause in one.pauses})]
        ),
        Column("Model"): lambda one: one.model,
        Column("Age", is_number=True): lambda one: (
            span(now_ms - one.age_from_ms) if one.age_from_ms else ""
        ),
        Column("Tokens", is_number=True, is_detail=True): lambda one: str(one.tokens),
        Column("Worker", is_whole=True, is_detail=True): lambda one: one.worker,
        Column("Error", is_whole=True, is_detail=True): lambda one: one.error,
    }


@click.command(cls=PlainCommand, short_help="List requests, by state, model, age.")
@click.option(
    "--state",
    "states",
    type=click.Choice(STATES),
    multiple=True,
    help="Only those in this state; may be repeated.",
)
@name_option("model", "Only those for this model.")
@click.option("--client", callback=client_name, help="Only those of this client.")
@click.option("--id", metavar="ID", callback=request_id, help="Only those with this id.")
@name_option("tenant", "Only those of this tenant.")
@name_option("worker", "Only those whose present or last worker is this one.")
@click.option(
    "--error", metavar="TEXT", default="", help="Only those whose error code or message has this."
)
@_age_option("--older-than", "older_ms", "at least")
@_age_option("--newer-than", "newer_ms", "at most")
@click.option(
    "--oldest", "oldest_first", is_flag=True, help="List the oldest first instead of the newest."
)
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="At most."
)
@click.option(
    "--scan-limit",
    type=click.IntRange(1000),
    default=100_000,
    show_default=True,
    help="Most entries of queues, and as many keys, to read.",
)
@verbose_option
@json_list_option("a request")
@click.pass_context
def requests(
    ctx: click.Context,
    /,
    states: tuple[str, ...],
    client: str | None,
    scan_limit: int,
    verbose: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """List requests that wait, are assigned to a worker, or have ended.

    A request is listed until its result expires. Its model is known while it waits or is assigned,
    and from its result if a worker answered it; without a name it uses the yard's only one. --error
    also finds requests that wait to run again, by what ended their last attempt. Requests that wait
    for a pause are marked, and the pauses are listed below. Columns that do not fit the terminal
    are left out without --verbose.

    Intakes and lanes are read page by page, and results are found with SCAN, each up to
    --scan-limit; if there may be more, the last line says so.

    Examples:
      tokenyard requests
      tokenyard requests --state waiting --older-than 5m --oldest
      tokenyard requests --state failed --client ann
      tokenyard requests --tenant acme --error "out of memory" --newer-than 1h
      tokenyard requests --worker w-0 --state assigned
      tokenyard requests --model adder --limit 1000 --json | jq -r .id

    Exit statuses:
      0  listed, possibly none     3  no broker, or its user may not list requests
      2  wrong usage
    """
    query = Query(
        states=frozenset(states or STATES),
        client=client or "",
        most=scan_limit,
        most_keys=scan_limit,
        **filters,
    )
    if query.newer_ms and query.newer_ms <= query.older_ms:
        raise click.UsageError("--newer-than must be longer ago than --older-than")
    with opened(ctx.obj) as yard:
        found = list_requests(yard, query)
    _print(found, as_json=as_json, is_whole=verbose)
    _say_what_is_missing(found, query)
    ctx.exit(Exit.UNAVAILABLE if query.ended_only and not found.may_scan else Exit.OK)


def _print(found: RequestList, *, as_json: bool, is_whole: bool) -> None:
    pauses = {pause.scope: pause for one in found.requests for pause in one.pauses}
    below = [f"Paused: {pause.text(found.now_ms)}" for pause in pauses.values()]
    show_list(
        found.requests,
        _columns(found.now_ms),
        "\n".join([*below, counted(len(found.requests), "request")]),
        as_json=as_json,
        has_details=is_whole,
        style=lambda one: "" if one.ended_ms else "bold",
    )


def _say_what_is_missing(found: RequestList, query: Query) -> None:
    if not found.may_scan:
        say(f"Error: {_NO_SCAN}" if query.ended_only else f"Note: {_NO_SCAN}", err=True)
    if found.has_more:
        say(f"Note: there may be more than --limit {query.limit}", err=True)
    elif not found.is_whole:
        say(
            f"Note: there may be more: only --scan-limit {query.most:,} entries and keys were read",
            err=True,
        )


# The timeline of a request.


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


# The result of an earlier request.

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
