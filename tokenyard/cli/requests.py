"""`tokenyard requests`: list the requests of a yard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.options import (
    CommandT,
    json_list_option,
    milliseconds,
    name_option,
    verbose_option,
)
from tokenyard.cli.shared.request_owner import client_name, request_id
from tokenyard.cli.shared.tables import Column, Columns, show_list
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.texts import counted, span
from tokenyard.yard.listing import Query, RequestList, list_requests
from tokenyard.yard.requests import STATES, Listed

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
