"""`tokenyard tenants list` and `show`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import click
import msgspec
from rich.table import Table

from tokenyard.cli.shared.completion import complete_tenant
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, print_list, say
from tokenyard.cli.shared.tables import Column, FittingTable, sheet
from tokenyard.ops.names import find_tenant
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.tenants import TenantSettings
from tokenyard.protocol.texts import counted, local_time
from tokenyard.yard.line import read_line
from tokenyard.yard.tenants import (
    TenantView,
    as_fields,
    read_tenants,
    read_windows,
    value_text,
    words_of,
)

LIST: Final = """List the tenants that somebody has set, or that have asked for something.

\b
Weight   tokens are shared in proportion to it
Share    of the tokens, by weight, among those that wait now; requests
         of no tenant are one of them, with weight 1
Waiting  requests, and the tokens of their prompts
Running  requests
Limits   what else is set; `tokenyard tenants show` has all of it

\b
Examples:
  tokenyard tenants list
  tokenyard tenants list --waiting
  tokenyard tenants list --json | jq -r '.[] | select(.waiting > 0) | .name'
"""
SHOW: Final = """Show the settings of a tenant, what it has waiting and running, and refusals.

Beside a limit of tokens stands what counts for it now: a request counts with all that it may
generate until it ends, and then with what it has used.

\b
Examples:
  tokenyard tenants show research
  tokenyard tenants show research --json | jq .settings
"""
_COLUMNS: Final = (
    Column("Tenant", is_whole=True),
    Column("Weight", is_number=True),
    Column("Share", is_number=True),
    Column("Waiting", is_number=True),
    Column("Tokens", is_number=True),
    Column("Running", is_number=True),
    Column("Limits"),
)


@click.command("list", cls=PlainCommand, help=LIST, short_help="List them.")
@click.option("--waiting", "only_waiting", is_flag=True, help="Only those that wait.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON array, a tenant on each line."
)
@click.pass_context
def list_all(ctx: click.Context, only_waiting: bool, as_json: bool) -> None:
    """Read all tenants once and print them."""
    with opened(ctx.obj) as yard:
        found, wanted = read_tenants(yard), read_line(yard).wanted
    shown = [one for one in found if one.waiting or not only_waiting]
    if as_json:
        print_list(_fields(one, wanted) for one in shown)
        return
    if shown:
        plain_console().print(_table(shown, wanted))
    say(counted(len(shown), "tenant"))


@click.command(cls=PlainCommand, help=SHOW, short_help="Show one.")
@click.argument("tenant", shell_complete=complete_tenant)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def show(ctx: click.Context, tenant: str, as_json: bool) -> None:
    """Read a tenant once and print it."""
    with opened(ctx.obj) as yard:
        found = read_tenants(yard)
        one = find_tenant(found, tenant)
        used, wanted = read_windows(yard, tenant), read_line(yard).wanted
    if as_json:
        say(msgspec.json.encode({**_fields(one, wanted), "used": used}))
        return
    plain_console().print(_sheet(one, wanted, used))


def _table(shown: Iterable[TenantView], wanted: Mapping[str, float]) -> FittingTable:
    table = FittingTable(_COLUMNS)
    for one in shown:
        table.add(*_row(one, wanted))
    return table


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
    lines.add_row("Share", _share(one, wanted))
    for name, count in one.refused.items():
        last = local_time(one.refused_ms.get(name, 0) / 1000)
        lately = f"{one.refused_lately.get(name, 0):,} in the last hour or two"
        lines.add_row("Refused", f"{count:,} by {name}, {lately}, the last at {last}")
    return lines


def _row(one: TenantView, wanted: Mapping[str, float]) -> tuple[str, ...]:
    words = words_of(one.settings).partition(", ")[2]
    return (
        one.name,
        f"{one.settings.weight:g}",
        _share(one, wanted),
        f"{one.waiting:,}",
        f"{one.waiting_tokens:,}",
        f"{one.running:,}",
        words or "-" if one.is_readable else "cannot be read: set them again",
    )


def _share(one: TenantView, wanted: Mapping[str, float]) -> str:
    share = wanted.get(one.name)
    return "-" if share is None else f"{share:.1%}"


def _fields(one: TenantView, wanted: Mapping[str, float]) -> dict[str, object]:
    return {
        **{name: getattr(one, name) for name in one.__struct_fields__},
        "refused": dict(one.refused),
        "refused_ms": dict(one.refused_ms),
        "refused_lately": dict(one.refused_lately),
        "settings": as_fields(one.settings),
        "share": wanted.get(one.name),
    }
