"""`tokenyard profile`: start and stop the profilers of engines."""

from __future__ import annotations

from typing import Any, Final

import click

from tokenyard.cli.shared.signal_options import SignalOptions, give, order_options
from tokenyard.process.program import PlainCommand, PlainGroup

ABOUT: Final = """Start and stop the profilers of the engines.

vLLM writes its traces to the place that `profiler_config` sets, one of the `engine_args` of the
model; a worker without it refuses.

\b
Examples:
  tokenyard profile start --worker gpu-1-0
  tokenyard profile stop --worker gpu-1-0

\b
Exit statuses:
  0  all have obeyed, or nothing to change
  1  not allowed now, or no such model or worker
  3  no broker, or workers that have not obeyed, which are named
"""


@click.group(cls=PlainGroup, help=ABOUT, short_help="Start or stop the engines' profilers.")
def profile() -> None:
    """The group; its commands do the work."""


@profile.command(cls=PlainCommand, short_help="Start them.")
@order_options
@click.pass_context
def start(ctx: click.Context, /, **options: Any) -> None:
    """Start the profilers. Suspended workers have none: resume them first."""
    give(ctx, SignalOptions(**options), "START_PROFILE", "profiling")


@profile.command(cls=PlainCommand, short_help="Stop them.")
@order_options
@click.pass_context
def stop(ctx: click.Context, /, **options: Any) -> None:
    """Stop the profilers, which then write the traces."""
    give(ctx, SignalOptions(**options), "STOP_PROFILE", "profiling stopped", "not profiling")
