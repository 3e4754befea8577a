"""`tokenyard tenants usage`: what tenants have used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import click

from tokenyard.cli.shared.completion import complete_tenant
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, print_list, say
from tokenyard.cli.shared.tables import Column, FittingTable
from tokenyard.ops.names import find_tenant
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.tenants import KEPT_DAYS
from tokenyard.protocol.texts import counted, printable, span
from tokenyard.yard.tenants import failures_text, read_tenants
from tokenyard.yard.usage import TenantUsage, read_usage

ABOUT: Final = """Show what tenants have used, by day (UTC) and model.

\b
Requests  that ended; failed and cancelled ones among them
In        tokens of prompts; Cached: those that a prefix cache had
Out       tokens of answers
Why they failed  how many, by the code of the error
P50, P99  half and 99 % of the requests waited for a worker at most so
          long; rounded up, to twice the time at most

In and Out are exact: over all tenants they are the tokens in the results. Requests without a
tenant are not counted. Usage is kept for 62 days; the leader and this command delete what is
older.

\b
Examples:
  tokenyard tenants usage
  tokenyard tenants usage research --days 30
  tokenyard tenants usage --model llama-8b --json | jq -s 'map(.[].tokens_out) | add'
"""
_COLUMNS: Final = (
    Column("Tenant", is_whole=True),
    Column("Day", is_whole=True),
    Column("Model"),
    Column("Requests", is_number=True),
    Column("In", is_number=True),
    Column("Out", is_number=True),
    Column("P50", is_number=True),
    Column("P99", is_number=True),
    Column("Cached", is_number=True, is_detail=True),
    Column("Failed", is_number=True, is_detail=True),
    Column("Cancelled", is_number=True, is_detail=True),
    Column("Why they failed", is_detail=True),
)


@click.command("usage", cls=PlainCommand, help=ABOUT, short_help="Show what they have used.")
@click.argument("tenants", metavar="[TENANT]...", nargs=-1, shell_complete=complete_tenant)
@click.option(
    "--days",
    type=click.IntRange(1, KEPT_DAYS),
    default=1,
    show_default=True,
    help="The last days, today included.",
)
@click.option("--model", default="", help="Only this model.")
@click.option("--verbose", is_flag=True, help="Show all columns.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, a row on each line.")
@click.pass_context
def show_usage(
    ctx: click.Context,
    tenants: tuple[str, ...],
    days: int,
    model: str,
    verbose: bool,
    as_json: bool,
) -> None:
    """Read the usage once and print it."""
    with opened(ctx.obj) as yard:
        known = read_tenants(yard)
        wanted = [find_tenant(known, name).name for name in tenants]
        wanted = list(dict.fromkeys(wanted)) or [one.name for one in known]
        found = read_usage(yard, wanted, days, model)
    if as_json:
        print_list(found)
        return
    if not found:
        say("nothing was used; requests without a tenant are not counted")
        return
    plain_console().print(_table(found, is_whole=verbose))
    say(_total(found))


def _table(found: Iterable[TenantUsage], *, is_whole: bool) -> FittingTable:
    table = FittingTable(_COLUMNS, has_details=is_whole)
    for one in found:
        table.add(*_row(one))
    return table


def _row(one: TenantUsage) -> tuple[str, ...]:
    return (
        one.tenant,
        one.day,
        printable(one.model) or "-",
        f"{one.requests:,}",
        f"{one.tokens_in:,}",
        f"{one.tokens_out:,}",
        _wait(one.wait_p50_ms),
        _wait(one.wait_p99_ms),
        f"{one.tokens_cached:,}",
        f"{one.failed:,}",
        f"{one.cancelled:,}",
        failures_text(one.failures) or "-",
    )


def _wait(ms: int | None) -> str:
    return "-" if ms is None else f"{ms} ms" if ms < 1000 else span(ms)


def _total(found: list[TenantUsage]) -> str:
    requests = sum(one.requests for one in found)
    read, written = (sum(one.tokens_in for one in found), sum(one.tokens_out for one in found))
    text = f"{counted(requests, 'request')}, {read:,} tokens in, {written:,} out"
    failed = sum((Counter(one.failures) for one in found), Counter[str]())
    return f"{text}; failed: {failures_text(failed)}" if failed else text
