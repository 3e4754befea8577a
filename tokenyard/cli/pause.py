"""`tokenyard pause`, `unpause`, `suspend`, `resume`: set the run state of workers."""

from __future__ import annotations

from typing import Any, Final

import click

from tokenyard.cli.shared.signal_options import SignalOptions, give, mode_option, order_options
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.control import PauseMode

_STATUSES: Final = """
\b
Exit statuses:
  0  all have obeyed, or nothing to change
  1  not allowed now, or no such model or worker
  3  no broker, or workers that have not obeyed, which are named
"""
PAUSE: Final = f"""Pause workers: they take no new requests, which wait in the queue.

\b
What happens to running requests, in vLLM's terms:
  abort  they return to the queue immediately, and continue at their next
         token on a running worker, or after `tokenyard unpause`
  wait   they finish
  keep   they stay on their worker with their KV cache, and continue at
         `unpause`; their deadlines still apply

The pause applies to the model or the name of the worker: a worker that joins later, or returns, is
paused as well. Leases are renewed and models stay loaded; `tokenyard suspend` frees the devices.

\b
Examples:
  tokenyard pause
  tokenyard pause --mode wait --model adder --timeout 600
  tokenyard pause --worker gpu-1-0 --mode keep --why "look at its driver"
{_STATUSES}"""
UNPAUSE: Final = f"""Let paused workers run again.

A worker runs when none of its scopes is paused: all workers, its model, its own name. Scopes that
are still paused are named.

\b
Examples:
  tokenyard unpause
  tokenyard unpause --model adder
{_STATUSES}"""
SUSPEND: Final = f"""Free the devices of paused workers: their engines sleep.

The workers must be paused; the requests that they kept return to the queue. vLLM's sleep mode moves
the weights to the host's memory and drops the KV cache. `tokenyard resume` wakes the workers, which
stay paused.

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


@click.command(cls=PlainCommand, help=PAUSE, short_help="Let workers take no new requests.")
@mode_option
@order_options
@click.pass_context
def pause(ctx: click.Context, /, mode: PauseMode, **options: Any) -> None:
    """Give PAUSE."""
    give(ctx, SignalOptions(**options), "PAUSE", "paused", mode=mode)


@click.command(cls=PlainCommand, help=UNPAUSE, short_help="Let paused workers run again.")
@order_options
@click.pass_context
def unpause(ctx: click.Context, /, **options: Any) -> None:
    """Give UNPAUSE."""
    give(ctx, SignalOptions(**options), "UNPAUSE", "unpaused", "not paused")


@click.command(cls=PlainCommand, help=SUSPEND, short_help="Free the devices of paused workers.")
@order_options
@click.pass_context
def suspend(ctx: click.Context, /, **options: Any) -> None:
    """Give SUSPEND."""
    give(ctx, SignalOptions(**options), "SUSPEND", "suspended")


@click.command(
    cls=PlainCommand, help=RESUME, short_help="Wake suspended workers; they stay paused."
)
@order_options
@click.pass_context
def resume(ctx: click.Context, /, **options: Any) -> None:
    """Give RESUME."""
    give(ctx, SignalOptions(**options), "RESUME", "awake, and paused", "not suspended")
