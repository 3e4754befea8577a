"""`tokenyard models`: list, load and unload models."""

from __future__ import annotations

from functools import partial
from typing import Final

import click

from tokenyard.cli.models.list import list_models
from tokenyard.cli.shared.operating import command
from tokenyard.ops import models as ops
from tokenyard.process.program import PlainGroup

#: Seconds that a command waits until all have obeyed.
_TIMEOUT_S: Final = 600.0
_change = partial(command, arguments=["model"], timeout_s=_TIMEOUT_S)

load = _change(ops.load, "load", "Load one.")
unload = _change(ops.unload, "unload", "Unload one.")
sleep = _change(ops.sleep, "sleep", "Put its workers to sleep.")
wake = _change(ops.wake, "wake", "Wake its workers.")
reload = command(ops.reload, "reload", "Give it new weights.", arguments=["model"])

ABOUT: Final = """List models and the workers that hold them, and load or unload them by hand.

Unless the coordinator is `--static`, models are loaded when requests need them: a model loaded here
may be replaced by one that requests wait for, and one unloaded here is loaded again when requests
come. `tokenyard pause --model` prevents that.

\b
Examples:
  tokenyard models list
  tokenyard models load adder
  tokenyard models load adder --worker gpu-1-0 --timeout 900
  tokenyard models unload adder
  tokenyard models reload policy --path /checkpoints/step-200

\b
Exit statuses:
  0  done, or nothing to change
  1  not possible now, or no such model or worker
  3  no broker, or workers that did not obey, which are named
"""


@click.group(
    cls=PlainGroup,
    help=ABOUT,
    short_help="List, load, unload, put to sleep, wake, reload.",
)
def models() -> None:
    """The group; its commands do the work."""


for _command in (list_models, load, unload, sleep, wake, reload):
    models.add_command(_command)
