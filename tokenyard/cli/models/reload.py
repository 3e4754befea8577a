"""`tokenyard models reload`: new weights for a model, in one command."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from tokenyard.admin.reloads import is_checkpoint_path, next_epoch, reload_failure
from tokenyard.admin.signals import Signals
from tokenyard.admin.snapshot import read_yard
from tokenyard.cli.shared.auditing import note
from tokenyard.cli.shared.completion import complete_model
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.names import find_model
from tokenyard.cli.shared.signal_options import (
    by_option,
    json_option,
    mode_option,
    timeout_option,
    unacknowledged_fields,
)
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.control import Invalid, PauseMode

ABOUT: Final = """Give a model new weights: pause it, load them, increase its epoch, unpause it.

All workers that hold the model replace their weights with the checkpoint at PATH and clear their
prefix caches; workers that load it later use the same checkpoint. PATH is a folder on the workers'
hosts, of the same architecture; each checkpoint needs its own path. An empty PATH restores the
model's own weights.

With --mode abort, running requests continue under the new weights after their published tokens.
With `wait` they finish first. With `keep` they continue in place, with the old weights' KV cache.

\b
Examples:
  tokenyard models reload policy --path /checkpoints/step-200
  tokenyard models reload policy --path /checkpoints/step-300 --epoch 300 --mode wait
  tokenyard models reload policy --path ''

Each host that may load the model checks PATH first. If a worker cannot load the weights, all
return to the previous weights and epoch, and the model runs again; the exit status is 1, or 3 if a
worker did not answer in time. A killed command leaves the model paused: the coordinator restores
the old weights after --timeout, or the same command continues the reload.
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Give one new weights.")
@click.argument("model", shell_complete=complete_model)
@click.option("--path", required=True, help="Folder of the checkpoint, on the workers' hosts.")
@click.option(
    "--epoch",
    type=click.IntRange(0),
    help="New generation epoch.  [default: the present one plus 1]",
)
@mode_option
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
    """Reload, and print the outcome."""
    if not is_checkpoint_path(path):
        raise click.BadParameter(
            f"{path!r}: give an absolute path, as the workers' hosts see it", param_hint="--path"
        )
    with opened(ctx.obj) as yard:
        signals = Signals(yard)
        desired_states = signals.desired_states()
        find_model(read_yard(yard), desired_states.by_scope, model)
        number = next_epoch(desired_states, model) if epoch is None else epoch
        try:
            unacknowledged = signals.reload(model, path, number, mode, timeout_s, by)
        except Invalid as error:
            raise click.ClickException(str(error)) from error
        weights = path or "its own weights"
        text = f"{model}: reload of {weights}, in epoch {number}"
        note(yard, "model.reload", [model], text, by=by)
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
        say(msgspec.json.encode(about | {"unacknowledged": unacknowledged_fields(unacknowledged)}))
    elif unacknowledged:
        say(f"Error: {reload_failure(model, now, unacknowledged, timeout_s)}", err=True)
    else:
        say(f"{model}: {path or 'its own weights'}, in epoch {number}")
    if not unacknowledged:
        ctx.exit(Exit.OK)
    ctx.exit(Exit.FAILED if any(one.reason for one in unacknowledged) else Exit.UNAVAILABLE)
