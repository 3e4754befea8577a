"""`tokenyard scripts`: load the scripts of this release."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.process.program import PlainCommand, PlainGroup
from tokenyard.protocol.wording import counted
from tokenyard.scripts import load_scripts

ABOUT: Final = """Load the scripts of this release into the server, for clients without that right.

The leader does this for its own release. While clients of another release are in use, run it with
that release after each restart of the server.

\b
Examples:
  tokenyard scripts load

\b
Exit statuses:
  0  the server has them all
  3  no usable broker
"""


@click.group(cls=PlainGroup, help=ABOUT, short_help="Load the scripts that clients call.")
def scripts() -> None:
    """The group; its command does the work."""


@scripts.command(cls=PlainCommand, short_help="Load the missing scripts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def load(ctx: click.Context, /, *, as_json: bool) -> None:
    """Load the scripts of this release that the server lacks."""
    with opened(ctx.obj) as (connection, _):
        count = load_scripts(connection)
    say(msgspec.json.encode({"loaded": count}) if as_json else f"{counted(count, 'script')} loaded")
