"""`tokenyard epoch`: the number that results carry."""

from __future__ import annotations

from typing import Any, Final

import click

from tokenyard.cli.shared.signal_options import Asked, give, order_options
from tokenyard.process.program import PlainCommand

ABOUT: Final = """Set the generation epoch: from then on each result has it in its provenance.

A loop that trains and generates in turns counts it up with each set of weights. A request that had
begun under another epoch says so (`first_epoch`), also where it went on elsewhere after a crash.
`tokenyard models reload` changes weights and epoch in one command.

\b
Examples:
  tokenyard epoch 7
  tokenyard epoch 8 --model policy --json

\b
Exit statuses:
  0  all have obeyed, or it was so already
  1  there is no such model or worker
  3  no broker, or workers that have not obeyed: they are named
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Set the epoch that results carry.")
@click.argument("number", metavar="N", type=click.IntRange(0))
@order_options
@click.pass_context
def epoch(ctx: click.Context, /, number: int, **asked: Any) -> None:
    """Give SET_GENERATION_EPOCH."""
    give(ctx, Asked(**asked), "SET_GENERATION_EPOCH", f"in epoch {number}", epoch=number)
