"""`tokenyard models`: which worker holds which model."""

from __future__ import annotations

from typing import Final

import click

from tokenyard.cli.models.change import load, sleep, unload, wake
from tokenyard.cli.models.list import list_models
from tokenyard.cli.models.reload import reload
from tokenyard.process.program import PlainGroup

ABOUT: Final = """Models: what may be loaded, who holds what, and changing that by hand.

Unless the coordinator is `--static`, requests have their models loaded by themselves: what is
loaded here gives way to a model that requests wait for, and what is unloaded is loaded again when
requests come. `tokenyard pause --model` keeps a model away.

\b
Examples:
  tokenyard models list
  tokenyard models load adder
  tokenyard models load adder --worker gpu-1-0 --timeout 900
  tokenyard models unload adder
  tokenyard models reload policy --path /checkpoints/step-200

\b
Exit statuses:
  0  done, or it was so already
  1  it is not possible now, or there is no such model or worker
  3  no broker, or workers that have not obeyed: they are named
"""


@click.group(
    cls=PlainGroup,
    help=ABOUT,
    short_help="Look at models; load, unload, put to sleep, wake, reload.",
)
def models() -> None:
    """The group; its commands do the work."""


for _command in (list_models, load, unload, sleep, wake, reload):
    models.add_command(_command)
