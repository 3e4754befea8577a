"""Keys for the HTTP gateway (`Authorization: Bearer ...`) and the board.

A key of a tenant opens the gateway: requests under it carry the tenant's name, and what one tenant
asked nobody else can read, cancel or continue. A key with a role opens the board: a viewer looks,
an operator also cancels, requeues, pauses and loads, an admin also sets tenants and keys. Redis
keeps only a digest of each key.

Examples:
  tokenyard keys create --tenant research
  tokenyard keys create --tenant nightly --models llama-8b --classes low
  tokenyard keys create --role operator --name "on call"
  tokenyard keys list
  tokenyard keys revoke 3f9a0c1d2b4e
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.operating import command
from tokenyard.cli.shared.options import json_list_option
from tokenyard.cli.shared.tables import Column, Columns, show_list
from tokenyard.ops import keys as ops
from tokenyard.ops.keys import list_keys
from tokenyard.process.program import PlainCommand, PlainGroup
from tokenyard.protocol.api_keys import ApiKey
from tokenyard.protocol.texts import counted, local_time

#: A key with its id.
_Listed = tuple[str, ApiKey]


def _allowed(names: Sequence[str] | None) -> str:
    return "all" if names is None else ", ".join(names) or "none"


def _minute(at_ms: int) -> str:
    """A time of this host's zone, whose name has no room in 80 columns."""
    return local_time(at_ms / 1000, "minutes")[: len("2026-11-22 02:00")]


_COLUMNS: Final[Columns[_Listed]] = {
    Column("Key", is_whole=True): lambda one: one[0],
    Column("Tenant", is_whole=True): lambda one: one[1].tenant,
    Column("Role", is_whole=True): lambda one: one[1].role,
    Column("Name"): lambda one: one[1].name,
    Column("Models"): lambda one: _allowed(one[1].models),
    Column("Classes"): lambda one: _allowed(one[1].classes),
    Column("Created", is_whole=True): lambda one: _minute(one[1].created_ms),
}


@click.command("list", cls=PlainCommand, short_help="List them.")
@json_list_option("a key")
@click.pass_context
def list_all(ctx: click.Context, as_json: bool) -> None:
    """List all keys, the oldest first."""
    with opened(ctx.obj) as yard:
        found = list(list_keys(yard).items())
    show_list(found, _COLUMNS, counted(len(found), "key"), as_json=as_json, fields=_fields)


def _fields(listed: _Listed) -> dict[str, Any]:
    key_id, key = listed
    return {"id": key_id, **msgspec.to_builtins(key)}


keys = PlainGroup(
    "keys",
    help=__doc__,
    short_help="Create, list or revoke keys of gateway and board.",
    commands=[
        command(ops.create, "create", "Create one; it is shown once."),
        list_all,
        command(ops.revoke, "revoke", "Revoke some."),
    ],
)
