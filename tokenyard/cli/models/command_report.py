"""Prints the outcome of commands to workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from tokenyard.admin.model_commands import SentCommand
from tokenyard.admin.signals import Unacknowledged
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.signal_options import say_unacknowledged, unacknowledged_fields
from tokenyard.process.program import Exit


def report(
    ctx: click.Context,
    sent: Sequence[SentCommand],
    unacknowledged: Sequence[Unacknowledged],
    *,
    about: dict[str, Any],
    as_json: bool,
    done: str,
    timeout_s: float,
) -> None:
    """Print the outcome of commands, and exit with its status."""
    if as_json:
        workers = [one.command.worker for one in sent]
        fields = {"ids": [one.id for one in sent], "workers": workers}
        fields["unacknowledged"] = unacknowledged_fields(unacknowledged)  # type: ignore[assignment]
        say(msgspec.json.encode(about | fields))
    elif unacknowledged:
        say_unacknowledged(unacknowledged, timeout_s)
    else:
        say(done)
    ctx.exit(Exit.UNAVAILABLE if unacknowledged else Exit.OK)
