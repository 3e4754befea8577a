"""`tokenyard drain` and `stop`: end worker processes for good."""

from __future__ import annotations

from typing import Any, Final

import click

from tokenyard.cli.shared.options import ask_first, yes_option
from tokenyard.cli.shared.signal_options import SignalOptions, give, order_options
from tokenyard.process.program import PlainCommand

_REST: Final = """
Their processes end and are not replaced; a controller ends when all of its processes have, and
`tokenyard up` with it. Only workers that are live now end: workers that join later run. To stop for
a while, use `tokenyard pause`.

\b
Examples:
{examples}

\b
Exit statuses:
  0  they have ended, or no worker is live
  1  no such model or worker, or the answer to the question is no
  2  for all workers without a terminal, --yes is needed
  3  no broker, or workers that have not ended, which are named
"""
DRAIN: Final = "End workers when their requests have finished.\n" + _REST.format(
    examples="  tokenyard drain --worker gpu-1-0 --timeout 600\n  tokenyard drain --yes --no-wait"
)
STOP: Final = "End workers immediately; their requests return to the queue.\n" + _REST.format(
    examples="  tokenyard stop --model adder\n  tokenyard stop --yes"
)


@click.command(cls=PlainCommand, help=DRAIN, short_help="End workers after their requests.")
@order_options
@yes_option
@click.pass_context
def drain(ctx: click.Context, /, is_sure: bool, **options: Any) -> None:
    """Give DRAIN."""
    _end(ctx, SignalOptions(**options), is_sure=is_sure, is_gentle=True)


@click.command(cls=PlainCommand, help=STOP, short_help="End workers immediately.")
@order_options
@yes_option
@click.pass_context
def stop(ctx: click.Context, /, is_sure: bool, **options: Any) -> None:
    """Give STOP."""
    _end(ctx, SignalOptions(**options), is_sure=is_sure, is_gentle=False)


def _end(ctx: click.Context, options: SignalOptions, *, is_sure: bool, is_gentle: bool) -> None:
    if not options.model and not options.worker:
        ask_first(f"End all workers of yard {ctx.obj.yard!r} for good?", is_sure=is_sure)
    give(ctx, options, "DRAIN" if is_gentle else "STOP", "ended")
