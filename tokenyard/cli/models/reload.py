"""`tokenyard models reload`: new weights for a model, in one command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from tokenyard.admin.signals import Signals, Unacknowledged
from tokenyard.admin.snapshot import read_yard
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.names import find_model
from tokenyard.cli.shared.signal_options import (
    by_option,
    holdout_fields,
    json_option,
    timeout_option,
)
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.control import PAUSE_MODES, DesiredState, DesiredStates, Invalid, PauseMode

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

Each host that may load the model looks at PATH first. Where a worker cannot have the weights all
of them go back to those before, in the epoch before, and the model goes on; the exit status is 1,
or 3 where a worker has not answered in time. A command that is killed leaves the model paused; the
coordinator brings the old weights back once --timeout is over, or the same command goes on.
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
@by_option
@json_option
@click.pass_context
def reload(
    ctx: click.Context,
    model: str,
    path: str,
    epoch: int | None,
    mode: PauseMode,
    timeout_s: float,
    by: str,
    as_json: bool,
) -> None:
    """Do the four steps, and say what came of it."""
    if path and not Path(path).is_absolute():
        raise click.BadParameter(
            f"{path!r}: give an absolute path, as the workers' hosts see it", param_hint="--path"
        )
    with opened(ctx.obj) as (connection, keys):
        signals = Signals(connection, keys)
        desired_states = signals.desired_states()
        find_model(read_yard(connection, keys), desired_states.by_scope, model)
        number = _next(desired_states, model) if epoch is None else epoch
        try:
            holdouts = signals.reload(model, path, number, mode, timeout_s, by)
        except Invalid as fault:
            raise click.ClickException(str(fault)) from fault
        now = signals.desired_states().of("", model)
    if as_json:
        about = {
            "model": model,
            "path": path,
            "epoch": now.epoch,
            "mode": mode,
            "run_state": now.run_state,
            "weights": now.weights,
        }
        say(msgspec.json.encode(about | {"holdouts": holdout_fields(holdouts)}))
    elif holdouts:
        say(f"Error: {_failure(model, now, holdouts, timeout_s)}", err=True)
    else:
        say(f"{model}: {path or 'its own weights'}, in epoch {number}")
    if not holdouts:
        ctx.exit(Exit.OK)
    ctx.exit(Exit.FAILED if any(one.reason for one in holdouts) else Exit.UNAVAILABLE)


def _failure(
    model: str, now: DesiredState, holdouts: Sequence[Unacknowledged], timeout_s: float
) -> str:
    """One sentence: who could not, why, and how the model is now."""
    one = next((each for each in holdouts if each.reason), holdouts[0])
    reason = one.reason or f"has not answered after {timeout_s:g} s"
    others = f" (and {len(holdouts) - 1} more)" if len(holdouts) > 1 else ""
    epoch = "" if now.epoch is None else f" in epoch {now.epoch}"
    weights = now.weights or "its own weights"
    return f"{one.name}{others}: {reason}; {model} is {now.run_state} with {weights}{epoch}"


def _next(desired_states: DesiredStates, model: str) -> int:
    """The epoch behind the present one; the first is 1."""
    return (desired_states.of("", model).epoch or 0) + 1
