"""`tokenyard profile`: the profilers of the engines."""

from __future__ import annotations

from typing import Any, Final

import click

from tokenyard.cli.shared.signal_options import Asked, give, order_options
from tokenyard.process.program import PlainCommand, PlainGroup

ABOUT: Final = """Start and stop the profilers of the engines.

vLLM writes its traces where `profiler_config` says, one of the `engine_args` of the model; a worker
without it refuses.

\b
Examples:
  tokenyard profile start --worker gpu-1-0
  tokenyard profile stop --worker gpu-1-0

\b
Exit statuses:
  0  all have obeyed, or it was so already
  1  it is not allowed now, or there is no such model or worker
  3  no broker, or workers that have not obeyed: they are named
"""


@click.group(cls=PlainGroup, help=ABOUT, short_help="Start or stop the engines' profilers.")
def profile() -> None:
    """The group; its commands do the work."""


@profile.command(cls=PlainCommand, short_help="Start them.")
@order_options
@click.pass_context
def start(ctx: click.Context, /, **asked: Any) -> None:
    """Start the profilers. Suspended workers have none: resume them first."""
    give(ctx, Asked(**asked), "START_PROFILE", "profiling")


@profile.command(cls=PlainCommand, short_help="Stop them.")
@order_options
@click.pass_context
def stop(ctx: click.Context, /, **asked: Any) -> None:
    """Stop the profilers; the traces are written then."""
    give(ctx, Asked(**asked), "STOP_PROFILE", "not profiling any more", "not profiling")
