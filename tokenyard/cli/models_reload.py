"""`tokenyard models reload`: new weights for a model, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import msgspec

from tokenyard.admin import read_yard
from tokenyard.cli.names import find_model
from tokenyard.cli.orders import holdout_fields, json_option, say_holdouts, timeout_option
from tokenyard.cli.reach import opened
from tokenyard.posture import PAUSE_MODES, Invalid, PauseMode, Postures
from tokenyard.program import Exit, PlainCommand
from tokenyard.signals import Signals

ABOUT: Final = """Give a model new weights: pause it, load them, count its epoch up, unpause it.

All workers that hold it load the checkpoint at PATH in place of their weights and forget their
prefix caches; those that load it later take it from the start. PATH is a folder as the workers'
hosts see it, of the same architecture; give each checkpoint a path of its own. An empty PATH brings
the model's own weights back.

With --mode abort running requests continue under the new weights, behind what they have published.
With `wait` they finish first. With `keep` they go on in place, on what the old weights computed.

\b
Examples:
  tokenyard models reload policy --path /checkpoints/step-200
  tokenyard models reload policy --path /checkpoints/step-300 --epoch 300 --mode wait
  tokenyard models reload policy --path ''

Where a worker has not obeyed, the exit status is 3 and the model stays as it is then, mostly
paused. The same command, with the epoch that it names, goes on from there.
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Give one new weights, in one command.")
@click.argument("model")
@click.option("--path", required=True, help="Folder of the checkpoint, on the workers' hosts.")
@click.option(
    "--epoch",
    type=click.IntRange(0),
    help="Generation epoch from then on.  [default: the present one and 1]",
)
@click.option(
    "--mode",
    type=click.Choice(PAUSE_MODES),
    default="abort",
    show_default=True,
    help="What becomes of running requests.",
)
@timeout_option(600.0)
@json_option
@click.pass_context
def reload(
    ctx: click.Context,
    model: str,
    path: str,
    epoch: int | None,
    mode: PauseMode,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Do the four steps, and say what came of it."""
    if path and not Path(path).is_absolute():
        raise click.BadParameter(
            f"{path!r}: give an absolute path, as the workers' hosts see it", param_hint="--path"
        )
    with opened(ctx.obj) as (connection, keys):
        signals = Signals(connection, keys)
        postures = signals.postures()
        find_model(read_yard(connection, keys), postures.by_scope, model)
        number = _next(postures, model) if epoch is None else epoch
        try:
            holdouts = signals.reload(model, path, number, mode, timeout_s)
        except Invalid as fault:
            raise click.ClickException(str(fault)) from fault
        conduct = signals.postures().of("", model).conduct
    if as_json:
        about = {"model": model, "path": path, "epoch": number, "mode": mode, "conduct": conduct}
        click.echo(msgspec.json.encode(about | {"holdouts": holdout_fields(holdouts)}))
    elif holdouts:
        say_holdouts(holdouts, timeout_s)
        click.echo(
            f"{model} is {conduct}; the same command with --epoch {number} goes on", err=True
        )
    else:
        click.echo(f"{model}: {path or 'its own weights'}, in epoch {number}")
    ctx.exit(Exit.UNAVAILABLE if holdouts else Exit.OK)


def _next(postures: Postures, model: str) -> int:
    """The epoch behind the present one; the first is 1."""
    return (postures.of("", model).epoch or 0) + 1
