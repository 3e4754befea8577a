"""`tokenyard tenants apply`: all tenants of a yard from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.operating import operator
from tokenyard.cli.shared.options import ask_first, json_option, yes_option
from tokenyard.ops import tenants
from tokenyard.ops.audit import COMMAND_LINE, AuditEntry
from tokenyard.ops.operation import record_done
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.keys import Yard, is_tenant
from tokenyard.protocol.settings import read_toml
from tokenyard.protocol.tenants import TENANT_RULE, TenantSettings
from tokenyard.protocol.texts import counted, did_you_mean, printable
from tokenyard.yard.tenants import differences, stored_tenants, words_of

_TABLES: Final = ("defaults", "tenants")


def read_tenants_file(path: Path) -> dict[str, TenantSettings]:
    """The tenants of a file, by name; raises `SettingsError` with all of its faults."""
    tables, faults = read_toml(path), list[str]()
    for key in tables.keys() - {*_TABLES}:
        hint = did_you_mean(key, _TABLES) or f"; use {' and '.join(_TABLES)}"
        faults.append(f"{key}: is not known{hint}")
    defaults = _values("defaults", tables.get("defaults", {}), faults)
    found = {}
    for name, table in _table("tenants", tables.get("tenants", {}), faults).items():
        if not is_tenant(name):
            faults.append(f"tenants.{name!r}: {TENANT_RULE}")
        found[name] = TenantSettings(**defaults | _values(f"tenants.{name}", table, faults))
    if faults:
        raise SettingsError([f"{path}: {fault}" for fault in faults])
    return found


def _values(at: str, table: Any, faults: list[str]) -> dict[str, Any]:
    """The valid settings of a table."""
    found = {}
    for key, value in _table(at, table, faults).items():
        if fault := tenants.setting_fault(key, value):
            faults.append(f"{at}.{fault}")
        else:
            found[key] = value
    return found


def _table(at: str, value: Any, faults: list[str]) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    faults.append(f"{at}: must be a table")
    return {}


@click.command("apply", cls=PlainCommand, short_help="Load a file with all of them.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only show what would change.")
@yes_option
@json_option
@click.pass_context
def apply_file(ctx: click.Context, file: Path, dry_run: bool, is_sure: bool, as_json: bool) -> None:
    """Load a file with all tenants: what is not in it goes.

    It shows what changes, asks, and changes all of it at once. Mistakes in the file are all named,
    and then nothing changes.

    A file:
      [defaults]                       # of the tenants in this file
      max_waiting_requests = 10_000
      [tenants.research]
      weight = 4
      [tenants.trial]
      tokens_per_day = 1_000_000
      classes = ["low"]

    Examples:
      tokenyard tenants apply tenants.toml --dry-run
      tokenyard tenants apply tenants.toml --yes
    """
    wanted = read_tenants_file(file)
    with opened(ctx.obj) as yard:
        changes = tenants.changes_to(stored_tenants(yard), wanted)
        if not as_json:
            _print(changes)
        if changes and not dry_run:
            ask_first(f"Change {counted(len(changes), 'tenant')}?", is_sure=is_sure)
            if not tenants.apply_changes(yard, changes):
                raise click.ClickException(
                    "others have changed these tenants meanwhile: look again"
                )
            _record(yard, changes, file)
    if as_json:
        listed = [tenants.change_fields(change) for change in changes]
        say(msgspec.json.encode({"changes": listed, "applied": not dry_run}))
    elif not changes:
        say(f"nothing to change: {counted(len(wanted), 'tenant')}")
    elif not dry_run:
        say(f"{counted(len(changes), 'tenant')} changed")


def _record(yard: Yard, changes: Sequence[tenants.TenantChange], file: Path) -> None:
    """Add it to the audit; where that fails, a warning: it is done all the same."""
    entry = AuditEntry(
        who=os.environ.get("TOKENYARD_OPERATOR") or operator(),
        role=COMMAND_LINE,
        action="tenant.apply",
        target=", ".join(change.name for change in changes),
        text=f"{counted(len(changes), 'tenant')} changed by {file.name}",
    )
    _, problem = record_done(yard, entry)
    if problem:
        say(f"Warning: this is not in the audit: {problem}", err=True)


def _print(changes: Sequence[tenants.TenantChange]) -> None:
    """A line for each tenant: ``+`` new, ``-`` no longer set, ``~`` changed."""
    for change in changes:
        name = printable(change.name)
        if change.after is None:
            say(f"- {name}: {words_of(change.before)}" if change.before else f"- {name}")
        elif change.before is None:
            say(f"{'~' if change.seen else '+'} {name}: {words_of(change.after)}")
        else:
            say(f"~ {name}: {differences(change.before, change.after)}")
