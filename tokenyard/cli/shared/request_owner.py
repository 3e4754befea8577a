"""Finds the client of a request id on a command line."""

from __future__ import annotations

import shlex
from typing import Final

import click
from redis.exceptions import NoPermissionError

from tokenyard.protocol.keys import NAME_RULE, Yard, is_name
from tokenyard.protocol.texts import listed, printable
from tokenyard.protocol.wire import DEFAULT_CLIENT, MAX_ID_BYTES
from tokenyard.yard.letters import find_letter
from tokenyard.yard.listing import MOST_KEYS, find_owners

_SAY: Final = "give --client NAME"


def request_id(_: click.Context, __: click.Parameter, value: str | None) -> str:
    """Check a request id; "" if none is given."""
    if value is None:
        return ""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise click.BadParameter(f"{value!a} is not UTF-8") from None
    if not 0 < size <= MAX_ID_BYTES:
        raise click.BadParameter(f"an id has 1 to {MAX_ID_BYTES} bytes, not {size}")
    return value


def client_name(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Check a client name."""
    if value is not None and not is_name(value):
        raise click.BadParameter(NAME_RULE)
    return value


#: For commands about existing requests.
client_option = click.option(
    "--client",
    callback=client_name,
    help=f"Client of the request.  [default: {DEFAULT_CLIENT}, else the only one with the id]",
)


def owner_of(yard: Yard, name: str, client: str | None) -> str:
    """The given client, else the only one that has the id, else `anon`.

    Raises `click.UsageError` if that is ambiguous or unknown.
    """
    if client is not None:
        return client
    shown = repr(name)
    try:
        owners = find_owners(yard, name)
    except NoPermissionError as error:
        raise click.UsageError(
            f"request {shown}: this user of Redis may not search for its client (SCAN); {_SAY}"
        ) from error
    named = listed(owners.clients)
    if not owners.is_whole:
        found = f"; until there {named} had it" if named else ""
        raise click.UsageError(
            f"request {shown}: its client was not found among the first {MOST_KEYS:,} keys of the"
            f" server{found}; {_SAY}"
        )
    if len(owners.clients) > 1:
        raise click.UsageError(f"request {shown}: several clients have one: {named}; {_SAY}")
    if owners.clients:
        return owners.clients[0]
    letter = find_letter(yard, name)  # which may outlive the ledger
    return letter.client if letter and letter.is_answerable else DEFAULT_CLIENT


def named(client: str, name: str) -> str:
    """The arguments that identify a request."""
    return f"{shlex.quote(printable(name))} --client {shlex.quote(client)}"
