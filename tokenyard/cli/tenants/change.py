"""`tokenyard tenants set` and `remove`."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from tokenyard.admin.tenant_texts import as_fields, differences, restriction, words_of
from tokenyard.admin.tenants import TenantChange, set_tenant, stored_tenants
from tokenyard.admin.tenants_file import setting_fault
from tokenyard.cli.shared.auditing import note
from tokenyard.cli.shared.completion import complete_tenant
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.names import known_tenant
from tokenyard.cli.shared.options import with_options
from tokenyard.process.program import PlainCommand
from tokenyard.process.settings_options import words
from tokenyard.protocol.keys import is_tenant
from tokenyard.protocol.tenants import TENANT_RULE, TenantSettings

SET: Final = """Set the share and the limits of a tenant; what is not given stays.

Changes count at once. What was accepted before is never ended: a lower limit refuses new requests
until there is room. 0 is no limit.

\b
Examples:
  tokenyard tenants set research --weight 4
  tokenyard tenants set trial --tokens-per-day 1000000 --classes low --models llama-8b
  tokenyard tenants set trial --tokens-per-day 0 --classes all --models all
"""
REMOVE: Final = """Remove what is set for tenants: they have weight 1 and no limits then.

Their waiting requests, keys of the gateway and usage stay.

\b
Examples:
  tokenyard tenants remove trial
  tokenyard tenants remove trial nightly
"""


def _limit(name: str, text: str) -> Any:
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=int, metavar="N", help=f"{text}; 0: no limit.")


_settings_options = with_options(
    click.option("--weight", type=float, help="Tokens are shared in proportion to it."),
    _limit("max_waiting_requests", "Requests that may wait"),
    _limit("max_waiting_tokens", "Tokens of prompts that may wait"),
    _limit("max_running_requests", "Requests that may run at once"),
    _limit("tokens_per_minute", "Tokens in and out in any minute"),
    _limit("tokens_per_day", "Tokens in and out in any 24 hours"),
    _limit("max_tokens", "Tokens that one request may ask for"),
    click.option("--models", type=words, help="Models that it may use, with commas, or all."),
    click.option("--classes", type=words, help="Priority classes: high, normal, low, or all."),
)


@click.command("set", cls=PlainCommand, help=SET, short_help="Set share and limits of one.")
@click.argument("tenant", shell_complete=complete_tenant)
@_settings_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def set_one(ctx: click.Context, /, tenant: str, as_json: bool, **options: Any) -> None:
    """Change the settings of one tenant and print them."""
    if not is_tenant(tenant):
        raise click.BadParameter(f"{tenant!r}: {TENANT_RULE}", param_hint="TENANT")
    given = {name: _value(value) for name, value in options.items() if value is not None}
    if not given:
        raise click.UsageError("give at least one setting, such as --weight")
    for name, value in given.items():
        if value is not None and (fault := setting_fault(name, value)):
            flag = f"--{name.replace('_', '-')}"
            raise click.BadParameter(fault.partition(": ")[2], param_hint=flag)

    def after(before: TenantSettings) -> TenantSettings:
        return msgspec.structs.replace(before, **given)

    with opened(ctx.obj) as yard:
        change = set_tenant(yard, tenant, after)
        if change.before is None:
            text = f"new, {words_of(change.after)}"
        else:
            text = differences(change.before, change.after)
        if text:
            note(yard, "tenant.set", [tenant], f"{tenant}: {text}")
    if as_json:
        say(msgspec.json.encode(change_fields(change)))
    else:
        say(f"{tenant}: {text or 'nothing to change'}")


@click.command(cls=PlainCommand, help=REMOVE, short_help="Remove settings.")
@click.argument(
    "tenants", metavar="TENANT...", nargs=-1, required=True, shell_complete=complete_tenant
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each.")
@click.pass_context
def remove(ctx: click.Context, tenants: tuple[str, ...], as_json: bool) -> None:
    """Remove the settings of tenants."""
    with opened(ctx.obj) as yard:
        stored = stored_tenants(yard)
        for name in tenants:
            known_tenant(stored, name)
        for name in dict.fromkeys(tenants):
            change = set_tenant(yard, name, lambda _: None)
            note(yard, "tenant.remove", [name], f"{name}: removed")
            if as_json:
                say(msgspec.json.encode(change_fields(change)))
            else:
                say(f"{name}: removed")


def _value(value: Any) -> Any:
    """An option's value as a setting."""
    return restriction(value) if isinstance(value, tuple) else value


def change_fields(change: TenantChange) -> dict[str, object]:
    """A change for JSON."""
    return {
        "tenant": change.name,
        "before": as_fields(change.before),
        "after": as_fields(change.after),
    }
