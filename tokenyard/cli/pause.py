"""`tokenyard pause`, `unpause`, `suspend`, `resume`: whether workers run."""

from __future__ import annotations

from typing import Any, Final

import click

from tokenyard.cli.shared.signal_options import Asked, give, order_options
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.control import PAUSE_MODES, PauseMode

_STATUSES: Final = """
\b
Exit statuses:
  0  all have obeyed, or it was so already
  1  it is not allowed now, or there is no such model or worker
  3  no broker, or workers that have not obeyed: they are named
"""
PAUSE: Final = f"""Let workers take nothing new. Requests queue up, and nothing is lost.

\b
What becomes of running requests, in vLLM's words:
  abort  they go back to the queue at once, and continue at their next token
         on a worker that runs, or after `tokenyard unpause`
  wait   they finish
  keep   they stay where they are, with their KV cache, and go on at `unpause`;
         their deadlines still act

It is kept for the model or the name of the worker: one that joins later, or comes back, is paused,
too. Leases are renewed meanwhile, and models stay loaded; `tokenyard suspend` frees the devices.

\b
Examples:
  tokenyard pause
  tokenyard pause --mode wait --model adder --timeout 600
  tokenyard pause --worker gpu-1-0 --mode keep --why "look at its driver"
{_STATUSES}"""
UNPAUSE: Final = f"""Let paused workers run again.

A worker runs when none of its scopes is paused: all workers, its model, its own name. Those that
still are paused are named.

\b
Examples:
  tokenyard unpause
  tokenyard unpause --model adder
{_STATUSES}"""
SUSPEND: Final = f"""Let paused workers free their devices: their engines fall asleep.

They must be paused; what they kept goes back to the queue. vLLM's sleep mode moves the weights to
the host's memory and drops the KV cache. `tokenyard resume` wakes them, and leaves them paused.

\b
Examples:
  tokenyard pause && tokenyard suspend
  tokenyard suspend --model adder --json
{_STATUSES}"""
RESUME: Final = f"""Wake suspended workers; they stay paused until `tokenyard unpause`.

\b
Examples:
  tokenyard resume && tokenyard unpause
  tokenyard resume --worker gpu-1-0
{_STATUSES}"""


@click.command(cls=PlainCommand, help=PAUSE, short_help="Let workers take nothing new.")
@click.option(
    "--mode",
    type=click.Choice(PAUSE_MODES),
    default="abort",
    show_default=True,
    help="What becomes of running requests.",
)
@order_options
@click.pass_context
def pause(ctx: click.Context, /, mode: PauseMode, **asked: Any) -> None:
    """Give PAUSE."""
    give(ctx, Asked(**asked), "PAUSE", "paused", mode=mode)


@click.command(cls=PlainCommand, help=UNPAUSE, short_help="Let paused workers run again.")
@order_options
@click.pass_context
def unpause(ctx: click.Context, /, **asked: Any) -> None:
    """Give UNPAUSE."""
    give(ctx, Asked(**asked), "UNPAUSE", "unpaused", "not paused")


@click.command(cls=PlainCommand, help=SUSPEND, short_help="Let paused workers free their devices.")
@order_options
@click.pass_context
def suspend(ctx: click.Context, /, **asked: Any) -> None:
    """Give SUSPEND."""
    give(ctx, Asked(**asked), "SUSPEND", "suspended")


@click.command(
    cls=PlainCommand, help=RESUME, short_help="Wake suspended workers; they stay paused."
)
@order_options
@click.pass_context
def resume(ctx: click.Context, /, **asked: Any) -> None:
    """Give RESUME."""
    give(ctx, Asked(**asked), "RESUME", "awake, and paused", "not suspended")
