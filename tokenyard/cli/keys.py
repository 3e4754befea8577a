"""`tokenyard keys`: the keys of the HTTP gateway and of the board."""

from __future__ import annotations

import datetime
from typing import Final

import click
import msgspec

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, print_list, say
from tokenyard.cli.shared.operating import command
from tokenyard.cli.shared.tables import Column, FittingTable
from tokenyard.ops import keys as ops
from tokenyard.process.program import PlainCommand, PlainGroup
from tokenyard.protocol.api_keys import ApiKey
from tokenyard.protocol.texts import counted, printable
from tokenyard.yard.keys import list_keys

ABOUT: Final = """Keys for the HTTP gateway (`Authorization: Bearer ...`) and the board.

A key of a tenant opens the gateway: requests under it carry the tenant's name, and what one tenant
asked nobody else can read, cancel or continue. A key with a role opens the board: a viewer looks,
an operator also cancels, requeues, pauses and loads, an admin also sets tenants and keys. Redis
keeps only a digest of each key.

\b
Examples:
  tokenyard keys create --tenant research
  tokenyard keys create --tenant nightly --models llama-8b --classes low
  tokenyard keys create --role operator --name "on call"
  tokenyard keys list
  tokenyard keys revoke 3f9a0c1d2b4e
"""
_COLUMNS: Final = (
    Column("Key", is_whole=True),
    Column("Tenant", is_whole=True),
    Column("Role", is_whole=True),
    Column("Name"),
    Column("Models"),
    Column("Classes"),
    Column("Created", is_whole=True),
)


@click.group(
    cls=PlainGroup, help=ABOUT, short_help="Create, list or revoke keys of gateway and board."
)
def keys() -> None:
    """The group; its commands do the work."""


keys.add_command(command(ops.create, "create", "Create one; it is shown once."))


@keys.command("list", cls=PlainCommand, short_help="List them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, a key on each line.")
@click.pass_context
def list_all(ctx: click.Context, as_json: bool) -> None:
    """List all keys, the oldest first."""
    with opened(ctx.obj) as yard:
        found = list_keys(yard)
    if as_json:
        print_list({"id": key_id, **msgspec.to_builtins(key)} for key_id, key in found.items())
        return
    if found:
        table = FittingTable(_COLUMNS)
        for key_id, key in found.items():
            table.add(key_id, *_row(key))
        plain_console().print(table)
    say(counted(len(found), "key"))


keys.add_command(command(ops.revoke, "revoke", "Revoke some."))


def _row(key: ApiKey) -> list[str]:
    created = datetime.datetime.fromtimestamp(key.created_ms / 1000, datetime.UTC).astimezone()
    return [
        printable(key.tenant) or "-",
        key.role or "-",
        printable(key.name) or "-",
        printable(", ".join(key.models)) or "none" if key.models is not None else "all",
        ", ".join(key.classes) or "none" if key.classes is not None else "all",
        f"{created:%Y-%m-%d %H:%M}",
    ]
