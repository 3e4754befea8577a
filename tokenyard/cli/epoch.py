"""`tokenyard epoch`: set the generation epoch of results."""

from __future__ import annotations

from typing import Any, Final

import click

from tokenyard.cli.shared.signal_options import SignalOptions, give, order_options
from tokenyard.process.program import PlainCommand

ABOUT: Final = """Set the generation epoch, which each later result has in its provenance.

A loop that trains and generates in turns increases it with each set of weights. The result of a
request that began under another epoch also has that one (`first_epoch`).
`tokenyard models reload` changes weights and epoch in one command.

\b
Examples:
  tokenyard epoch 7
  tokenyard epoch 8 --model policy --json

\b
Exit statuses:
  0  all have obeyed, or nothing to change
  1  no such model or worker
  3  no broker, or workers that have not obeyed, which are named
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Set the epoch of results.")
@click.argument("number", metavar="N", type=click.IntRange(0))
@order_options
@click.pass_context
def epoch(ctx: click.Context, /, number: int, **options: Any) -> None:
    """Give SET_GENERATION_EPOCH."""
    give(ctx, SignalOptions(**options), "SET_GENERATION_EPOCH", f"in epoch {number}", epoch=number)
