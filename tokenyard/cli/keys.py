"""`tokenyard keys`: the keys of the HTTP gateway and of the board."""

from __future__ import annotations

import datetime
from typing import Final, get_args

import click
import msgspec

from tokenyard.admin.api_keys import MAX_NAME, create_key, list_keys, revoke_key
from tokenyard.admin.tenant_texts import ALL, Word, restriction
from tokenyard.cli.shared.auditing import note
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, print_list, say
from tokenyard.cli.shared.tables import Column, FittingTable
from tokenyard.process.program import Exit, PlainCommand, PlainGroup
from tokenyard.process.settings_options import words
from tokenyard.protocol.api_keys import ID_DIGITS, PREFIX, ApiKey, Role, key_digest
from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.texts import counted, printable

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


@keys.command(cls=PlainCommand, short_help="Create one; it is shown once.")
@click.option("--tenant", default="", help="Whose key it is; without one it opens no gateway.")
@click.option(
    "--role",
    type=click.Choice(get_args(Role)),
    help="What it may do at the board; without one it opens no board.",
)
@click.option("--name", default="", help="What it is for.")
@click.option("--models", type=words, help="Models that it may use, with commas, or all.  [all]")
@click.option(
    "--classes",
    type=words,
    help="Priority classes that it may use: high, normal, low, or all.  [all]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def create(
    ctx: click.Context,
    tenant: str,
    role: Role | None,
    name: str,
    models: tuple[str, ...] | None,
    classes: tuple[PriorityClass, ...] | None,
    as_json: bool,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    if not tenant and role is None:
        raise click.UsageError("give --tenant, --role, or both")
    if len(name) > MAX_NAME:
        raise click.BadParameter(f"give {MAX_NAME} characters at most", param_hint="--name")
    wrong = set(classes or ()) - {*get_args(PriorityClass), ALL}
    if wrong:
        raise click.BadParameter(f"there is no class {min(wrong)!r}", param_hint="--classes")
    with opened(ctx.obj) as yard:
        key, key_id = create_key(
            yard,
            tenant,
            role=role,
            name=name,
            models=_restriction(models),
            classes=_restriction(classes),
        )
        whose = f" of {tenant}" if tenant else ""
        whose += f", {role} at the board" if role else ""
        note(yard, "key.create", [f"key {key_id}"], f"Key {key_id}{whose} created.")
    if as_json:
        say(msgspec.json.encode({"id": key_id, "key": key, "tenant": tenant, "role": role}))
    else:
        say(key)
        say(f"Key {key_id}{whose}. Keep it: it cannot be shown again.", err=True)


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


@keys.command(cls=PlainCommand, short_help="Revoke one.")
@click.argument("key")
@click.pass_context
def revoke(ctx: click.Context, key: str) -> None:
    """Revoke a key by its id (see `keys list`) or by itself. Running requests go on."""
    with opened(ctx.obj) as yard:
        is_revoked = revoke_key(yard, key)
        if is_revoked:
            name = key_digest(key)[:ID_DIGITS] if key.startswith(PREFIX) else key
            note(yard, "key.revoke", [f"key {name}"], f"Key {name} revoked.")
    if not is_revoked:
        say("Error: there is no such key; see `tokenyard keys list`", err=True)
        ctx.exit(Exit.FAILED)
    say("Revoked; gateways and boards notice within seconds.")


def _restriction(given: tuple[Word, ...] | None) -> list[Word] | None:
    """What the key may use; an empty list stays, to be refused: it would open nothing."""
    return restriction(given) if given else given if given is None else []


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
