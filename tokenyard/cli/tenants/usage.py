"""`tokenyard tenants usage`: what tenants have used."""

from __future__ import annotations

from collections import Counter
from typing import Final

import click

from tokenyard.cli.shared.completion import COMPLETE
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.options import json_list_option, verbose_option
from tokenyard.cli.shared.tables import Column, Columns, show_list
from tokenyard.ops.names import find_tenant
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.tenants import KEPT_DAYS
from tokenyard.protocol.texts import counted, span
from tokenyard.yard.tenants import failures_text, read_tenants
from tokenyard.yard.usage import TenantUsage, read_usage

_NOTHING: Final = "nothing was used; requests without a tenant are not counted"


def _wait(ms: int | None) -> str:
    return "" if ms is None else f"{ms} ms" if ms < 1000 else span(ms)


_COLUMNS: Final[Columns[TenantUsage]] = {
    Column("Tenant", is_whole=True): lambda one: one.tenant,
    Column("Day", is_whole=True): lambda one: one.day,
    Column("Model"): lambda one: one.model,
    Column("Requests", is_number=True): lambda one: one.requests,
    Column("In", is_number=True): lambda one: one.tokens_in,
    Column("Out", is_number=True): lambda one: one.tokens_out,
    Column("P50", is_number=True): lambda one: _wait(one.wait_p50_ms),
    Column("P99", is_number=True): lambda one: _wait(one.wait_p99_ms),
    Column("Cached", is_number=True, is_detail=True): lambda one: one.tokens_cached,
    Column("Failed", is_number=True, is_detail=True): lambda one: one.failed,
    Column("Cancelled", is_number=True, is_detail=True): lambda one: one.cancelled,
    Column("Why they failed", is_detail=True): lambda one: failures_text(one.failures),
}


@click.command("usage", cls=PlainCommand, short_help="Show what they have used.")
@click.argument("tenants", metavar="[TENANT]...", nargs=-1, shell_complete=COMPLETE["tenant"])
@click.option(
    "--days",
    type=click.IntRange(1, KEPT_DAYS),
    default=1,
    show_default=True,
    help="The last days, today included.",
)
@click.option("--model", default="", help="Only this model.")
@verbose_option
@json_list_option("a row")
@click.pass_context
def show_usage(
    ctx: click.Context,
    tenants: tuple[str, ...],
    days: int,
    model: str,
    verbose: bool,
    as_json: bool,
) -> None:
    """Show what tenants have used, by day (UTC) and model.

    Requests  that ended; failed and cancelled ones among them
    In        tokens of prompts; Cached: those that a prefix cache had
    Out       tokens of answers
    Why they failed  how many, by the code of the error
    P50, P99  half and 99 % of the requests waited for a worker at most so
              long; rounded up, to twice the time at most

    In and Out are exact: over all tenants they are the tokens in the results. Requests without a
    tenant are not counted. Usage is kept for 62 days; the leader and this command delete what is
    older.

    Examples:
      tokenyard tenants usage
      tokenyard tenants usage research --days 30
      tokenyard tenants usage --model llama-8b --json | jq -s 'map(.[].tokens_out) | add'
    """
    with opened(ctx.obj) as yard:
        known = read_tenants(yard)
        wanted = [find_tenant(known, name).name for name in tenants]
        wanted = list(dict.fromkeys(wanted)) or [one.name for one in known]
        found = read_usage(yard, wanted, days, model)
    below = _total(found) if found else _NOTHING
    show_list(found, _COLUMNS, below, as_json=as_json, has_details=verbose)


def _total(found: list[TenantUsage]) -> str:
    requests = sum(one.requests for one in found)
    read, written = (sum(one.tokens_in for one in found), sum(one.tokens_out for one in found))
    text = f"{counted(requests, 'request')}, {read:,} tokens in, {written:,} out"
    failed = sum((Counter(one.failures) for one in found), Counter[str]())
    return f"{text}; failed: {failures_text(failed)}" if failed else text
