"""`tokenyard drain` and `stop`: end worker processes for good."""

from __future__ import annotations

from typing import Any, Final

import click

from tokenyard.cli.shared.confirm import ask_first, yes_option
from tokenyard.cli.shared.signal_options import Asked, give, order_options
from tokenyard.process.program import PlainCommand

_REST: Final = """
Their processes end for good, and no others are started in their places; a controller ends when all
of its processes have, and `tokenyard up` with it. It is said to those who are there now: workers
that join later run. To stop for a while, use `tokenyard pause`.

\b
Examples:
{examples}

\b
Exit statuses:
  0  they have ended, or nobody is there
  1  there is no such model or worker, or the answer to the question is no
  2  all workers were meant, and there is no terminal to ask on, and no --yes
  3  no broker, or workers that have not ended: they are named
"""
DRAIN: Final = "End workers when they have finished what they have.\n" + _REST.format(
    examples="  tokenyard drain --worker gpu-1-0 --timeout 600\n  tokenyard drain --yes --no-wait"
)
STOP: Final = "End workers at once; what they had goes back to the queue.\n" + _REST.format(
    examples="  tokenyard stop --model adder\n  tokenyard stop --yes"
)


@click.command(cls=PlainCommand, help=DRAIN, short_help="End workers when they have finished.")
@order_options
@yes_option
@click.pass_context
def drain(ctx: click.Context, /, is_sure: bool, **asked: Any) -> None:
    """Give DRAIN."""
    _end(ctx, Asked(**asked), is_sure=is_sure, is_gentle=True)


@click.command(cls=PlainCommand, help=STOP, short_help="End workers at once.")
@order_options
@yes_option
@click.pass_context
def stop(ctx: click.Context, /, is_sure: bool, **asked: Any) -> None:
    """Give STOP."""
    _end(ctx, Asked(**asked), is_sure=is_sure, is_gentle=False)


def _end(ctx: click.Context, asked: Asked, *, is_sure: bool, is_gentle: bool) -> None:
    if not asked.model and not asked.worker:
        ask_first(f"End all workers of yard {ctx.obj.yard!r} for good?", is_sure=is_sure)
    give(ctx, asked, "DRAIN" if is_gentle else "STOP", "ended")
