"""`tokenyard tenants acl`: the user of Redis with which a tenant logs in."""

from __future__ import annotations

import sys
from typing import Final

import click

from tokenyard.admin.tenant_acl import acl_line
from tokenyard.admin.tenants import read_tenants
from tokenyard.cli.shared.completion import complete_tenant
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.process.program import PlainCommand

ABOUT: Final = """Print the user of Redis with which a tenant may log in: a line for users.acl.

Such a user writes into an inbox of its own and reads the answers to its own requests, and nothing
else. The leader reads that inbox as soon as the tenant is a guest (`tenants set NAME --guest`), and
its requests are those of the tenant, whatever they say. Nothing is changed on the server.

\b
Examples:
  tokenyard tenants acl research
  openssl rand -base64 30 | tee password | tokenyard tenants acl research --password-stdin
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Print its user of Redis.")
@click.argument("tenant", shell_complete=complete_tenant)
@click.option(
    "--password-stdin",
    "reads_password",
    is_flag=True,
    help="Read its password from the standard input.  [default: none, nobody can log in]",
)
@click.pass_context
def acl(ctx: click.Context, tenant: str, reads_password: bool) -> None:
    """Print the line; the line has a digest of the password only."""
    password = sys.stdin.readline().strip() if reads_password else ""
    if reads_password and not password:
        raise click.UsageError("the standard input has no password")
    with opened(ctx.obj) as (connection, keys):
        known = read_tenants(connection, keys)
    say(acl_line(keys, tenant, password, [one.name for one in known]))
    if not any(one.name == tenant and one.settings.guest for one in known):
        say(f"Nobody reads its inbox yet: tokenyard tenants set {tenant} --guest", err=True)
