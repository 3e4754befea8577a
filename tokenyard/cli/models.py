"""List models and the workers that hold them, and load or unload them by hand.

Unless the coordinator is `--static`, models are loaded when requests need them: a model loaded here
may be replaced by one that requests wait for, and one unloaded here is loaded again when requests
come. `tokenyard pause --model` prevents that.

Examples:
  tokenyard models list
  tokenyard models load adder
  tokenyard models load adder --worker gpu-1-0 --timeout 900
  tokenyard models unload adder
  tokenyard models reload policy --path /checkpoints/step-200

Exit statuses:
  0  done, or nothing to change
  1  not possible now, or no such model or worker
  3  no broker, or workers that did not obey, which are named
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import click
import msgspec

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.cli.shared.operating import command
from tokenyard.cli.shared.options import json_option
from tokenyard.cli.shared.tables import Column, Columns, table_of
from tokenyard.ops import models as ops
from tokenyard.process.program import PlainCommand, PlainGroup
from tokenyard.protocol.control import DesiredState
from tokenyard.protocol.worker_info import ModelInfo, WorkerInfo
from tokenyard.yard.models import ModelView, model_views
from tokenyard.yard.pauses import all_pauses
from tokenyard.yard.snapshot import read_yard


def _offers(view: ModelView) -> Iterator[str]:
    for controller, info in view.hosts.items():
        took = f" ({info.load_s:.2f} s)" if info.load_s else ""
        yield f"{controller}{took}"
    yield from (f"{controller} (not there)" for controller in view.gone)


def _state(worker: str, info: WorkerInfo, desired_state: DesiredState) -> str:
    """Its state, and differences from the model's desired state."""
    said = [f"{worker} {info.state}"]
    if info.run_state != desired_state.run_state:
        said.append(info.run_state)
    if info.epoch != desired_state.epoch:
        said.append("no epoch" if info.epoch is None else f"epoch {info.epoch}")
    if info.weights != desired_state.weights:
        said.append(f"weights {info.weights or 'its own'}")
    return ", ".join(said)


def _errors(view: ModelView) -> Iterator[str]:
    for controller, info in view.offers.items():
        if info.fault:
            yield f"{controller}, {info.faults} in a row: {info.fault}"


_COLUMNS: Final[Columns[ModelView]] = {
    Column("Model", is_whole=True): lambda one: one.name,
    Column("Run state", is_whole=True): lambda one: one.desired_state.run_state,
    Column("Workers", is_whole=True): lambda one: [
        _state(worker, info, one.desired_state) for worker, info in one.workers.items()
    ],
    Column("Loadable", is_whole=True): lambda one: list(_offers(one)),
    Column("Weights"): lambda one: one.desired_state.weights,
    Column("Epoch", is_number=True): lambda one: (
        "" if one.desired_state.epoch is None else str(one.desired_state.epoch)
    ),
    Column("Error"): lambda one: list(_errors(one)),
}


@click.command("list", cls=PlainCommand, short_help="List them with their workers.")
@json_option
@click.pass_context
def list_models(ctx: click.Context, as_json: bool) -> None:
    """List the models: where they may be loaded, their workers, and their desired state.

    Run state  RUNNING, PAUSED or SUSPENDED, as set for all or for this model;
               workers in another state show it
    Workers    that hold it, and their states
    Loadable   controllers that may load it, with the time of the last load; where
               none is there, the last that was
    Weights    a checkpoint instead of the model's own weights, see `models reload`
    Epoch      in its results, see `tokenyard epoch`
    Error      why and where it could not be loaded

    Weights, Epoch and Error are shown if there are any. Below are all pauses, with operator,
    duration and reason.

    Examples:
      tokenyard models list
      tokenyard models list --json | jq '.models[] | {name, epoch}'
    """
    with opened(ctx.obj) as yard:
        view = read_yard(yard)
    views = model_views(view)
    if as_json:
        say(msgspec.json.encode({"models": [_fields(one) for one in views]}))
    elif views:
        plain_console().print(table_of(views, _COLUMNS))
        for pause in all_pauses(view.desired_states):
            say(pause.text(view.at_ms))
    else:
        say("no models: no host is live")


def _fields(view: ModelView) -> dict[str, object]:
    return {
        "name": view.name,
        "hosts": [_offer(controller, info) for controller, info in view.hosts.items()],
        "gone": [_offer(controller, info) for controller, info in view.gone.items()],
        "workers": [_holder(worker, info) for worker, info in view.workers.items()],
        "run_state": view.desired_state.run_state,
        "pauses": [msgspec.to_builtins(pause) for pause in view.pauses],
        "epoch": view.desired_state.epoch,
        "weights": view.desired_state.weights,
    }


def _offer(controller: str, info: ModelInfo) -> dict[str, object]:
    names = ("ranks", "pin", "adapters", "load_s", "fault", "faults")
    return {"controller": controller} | {one: getattr(info, one) for one in names}


def _holder(worker: str, info: WorkerInfo) -> dict[str, object]:
    names = ("name", "state", "run_state", "epoch", "weights")
    return {"worker": worker} | {one: getattr(info, one) for one in names}


#: Seconds that a command waits until all have obeyed.
_TIMEOUT_S: Final = 600.0
_change = partial(command, arguments=["model"], timeout_s=_TIMEOUT_S)

models = PlainGroup(
    "models",
    help=__doc__,
    short_help="List, load, unload, put to sleep, wake, reload.",
    commands=[
        list_models,
        _change(ops.load, "load", "Load one."),
        _change(ops.unload, "unload", "Unload one."),
        _change(ops.sleep, "sleep", "Put its workers to sleep."),
        _change(ops.wake, "wake", "Wake its workers."),
        command(ops.reload, "reload", "Give it new weights.", arguments=["model"]),
    ],
)
