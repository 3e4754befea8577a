"""`tokenyard tenants list`, `show` and `usage`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Final

import click
import msgspec
from rich.table import Table

from tokenyard.cli.completion import COMPLETE
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.cli.shared.options import json_list_option, json_option, verbose_option
from tokenyard.cli.shared.tables import Column, Columns, percent, sheet, show_list
from tokenyard.ops.names import find_tenant
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.tenants import KEPT_DAYS, TenantSettings
from tokenyard.protocol.texts import counted, local_time, span
from tokenyard.yard.line import read_line
from tokenyard.yard.tenants import (
    TenantView,
    as_fields,
    failures_text,
    read_tenants,
    read_windows,
    value_text,
    words_of,
)
from tokenyard.yard.usage import TenantUsage, read_usage


def _limits(one: TenantView) -> str:
    words = words_of(one.settings).partition(", ")[2]
    return words if one.is_readable else "cannot be read: set them again"


def _columns(wanted: Mapping[str, float]) -> Columns[TenantView]:
    return {
        Column("Tenant", is_whole=True): lambda one: one.name,
        Column("Weight", is_number=True): lambda one: f"{one.settings.weight:g}",
        Column("Share", is_number=True): lambda one: percent(wanted.get(one.name)),
        Column("Waiting", is_number=True): lambda one: one.waiting,
        Column("Tokens", is_number=True): lambda one: one.waiting_tokens,
        Column("Running", is_number=True): lambda one: one.running,
        Column("Limits"): _limits,
    }


@click.command("list", cls=PlainCommand, short_help="List them.")
@click.option("--waiting", "only_waiting", is_flag=True, help="Only those that wait.")
@json_list_option("a tenant")
@click.pass_context
def list_all(ctx: click.Context, only_waiting: bool, as_json: bool) -> None:
    """List the tenants that somebody has set, or that have asked for something.

    Weight   tokens are shared in proportion to it
    Share    of the tokens, by weight, among those that wait now; requests
             of no tenant are one of them, with weight 1
    Waiting  requests, and the tokens of their prompts
    Running  requests
    Limits   what else is set; `tokenyard tenants show` has all of it

    Examples:
      tokenyard tenants list
      tokenyard tenants list --waiting
      tokenyard tenants list --json | jq -r '.[] | select(.waiting > 0) | .name'
    """
    with opened(ctx.obj) as yard:
        found, wanted = read_tenants(yard), read_line(yard).wanted
    shown = [one for one in found if one.waiting or not only_waiting]
    below, fields = counted(len(shown), "tenant"), partial(_fields, wanted)
    show_list(shown, _columns(wanted), below, as_json=as_json, fields=fields)


@click.command(cls=PlainCommand, short_help="Show one.")
@click.argument("tenant", shell_complete=COMPLETE["tenant"])
@json_option
@click.pass_context
def show(ctx: click.Context, tenant: str, as_json: bool) -> None:
    """Show the settings of a tenant, what it has waiting and running, and refusals.

    Beside a limit of tokens stands what counts for it now: a request counts with all that it may
    generate until it ends, and then with what it has used.

    Examples:
      tokenyard tenants show research
      tokenyard tenants show research --json | jq .settings
    """
    with opened(ctx.obj) as yard:
        found = read_tenants(yard)
        one = find_tenant(found, tenant)
        [used], wanted = read_windows(yard, [tenant]), read_line(yard).wanted
    if as_json:
        say(msgspec.json.encode({**_fields(wanted, one), "used": used}))
        return
    plain_console().print(_sheet(one, wanted, used))


def _sheet(one: TenantView, wanted: Mapping[str, float], used: Mapping[str, int]) -> Table:
    lines = sheet()
    lines.add_row("Tenant", one.name)
    if not one.is_readable:
        lines.add_row("Settings", "cannot be read and do not count: set them again")
    for name in TenantSettings.__struct_fields__:
        value = getattr(one.settings, name)
        text = value_text(name, value)
        lines.add_row(name, f"{text}, {used[name]:,} used" if value and name in used else text)
    lines.add_row("Waiting", f"{one.waiting:,} requests, {one.waiting_tokens:,} tokens")
    lines.add_row("Running", f"{one.running:,} requests")
    lines.add_row("Share", percent(wanted.get(one.name)))
    for name, count in one.refused.items():
        last = local_time(one.refused_ms.get(name, 0) / 1000)
        lately = f"{one.refused_lately.get(name, 0):,} in the last hour or two"
        lines.add_row("Refused", f"{count:,} by {name}, {lately}, the last at {last}")
    return lines


def _fields(wanted: Mapping[str, float], one: TenantView) -> dict[str, object]:
    return {
        **msgspec.structs.asdict(one),
        "settings": as_fields(one.settings),
        "share": wanted.get(one.name),
    }


# `tokenyard tenants usage`.

_NOTHING: Final = "nothing was used; requests without a tenant are not counted"


def _wait(ms: int | None) -> str:
    return "" if ms is None else f"{ms} ms" if ms < 1000 else span(ms)


_USAGE_COLUMNS: Final[Columns[TenantUsage]] = {
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
    show_list(found, _USAGE_COLUMNS, below, as_json=as_json, has_details=verbose)


def _total(found: list[TenantUsage]) -> str:
    requests = sum(one.requests for one in found)
    read, written = (sum(one.tokens_in for one in found), sum(one.tokens_out for one in found))
    text = f"{counted(requests, 'request')}, {read:,} tokens in, {written:,} out"
    failed = sum((Counter(one.failures) for one in found), Counter[str]())
    return f"{text}; failed: {failures_text(failed)}" if failed else text
