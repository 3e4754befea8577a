"""`tokenyard models load`, `unload`, `sleep`, `wake`: commands to workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import click

from tokenyard.admin.model_placement import LoadTarget, NoPlace, place_anywhere, place_at
from tokenyard.admin.signals import Signals
from tokenyard.admin.snapshot import WorkerView, YardView, read_yard
from tokenyard.cli.models.command_wait import report, send, wait_for
from tokenyard.cli.shared.completion import complete_model, complete_worker
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.names import find_model, find_worker
from tokenyard.cli.shared.options import with_options
from tokenyard.cli.shared.signal_options import json_option, timeout_option, wait_option, why_option
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.commands import Command
from tokenyard.protocol.worker_info import WorkerState
from tokenyard.scripts import Scripts

Change = Literal["unload", "sleep", "wake"]

LOAD: Final = """Load a model on a worker whose host may load it.

Without --worker, a worker is chosen where the model sleeps, or whose device is free or idle;
nothing is done if a worker holds the model. With --worker, that one loads it: its running requests
finish first, and its present model is put to sleep or unloaded.

\b
Examples:
  tokenyard models load adder
  tokenyard models load adder --worker gpu-1-0
  tokenyard models load adder --no-wait --json
"""
UNLOAD: Final = """Unload a model from its workers; running requests finish first.

\b
Examples:
  tokenyard models unload adder
  tokenyard models unload adder --worker gpu-1-0
"""
SLEEP: Final = """Put the workers that hold a model to sleep; running requests finish first.

\b
  --level 1  the weights are kept in the host's memory
  --level 2  nothing is kept, and waking reads the weights again

\b
Examples:
  tokenyard models sleep adder
  tokenyard models sleep adder --worker gpu-1-0 --level 2
"""
WAKE: Final = """Wake the workers that sleep with a model.

\b
Examples:
  tokenyard models wake adder
  tokenyard models wake adder --worker gpu-1-0
"""
#: States in which a worker can obey.
_FROM: Final[dict[Change, frozenset[WorkerState]]] = {
    "unload": frozenset({"loading", "ready", "asleep"}),
    "sleep": frozenset({"ready"}),
    "wake": frozenset({"asleep"}),
}
_DONE: Final[dict[Change, str]] = {"unload": "unloaded", "sleep": "asleep", "wake": "awake"}
_NOBODY: Final[dict[Change, str]] = {
    "unload": "no worker holds it",
    "sleep": "no worker has it ready",
    "wake": "no worker sleeps with it",
}
_change_options: Final = with_options(
    click.argument("model", shell_complete=complete_model),
    click.option(
        "--worker", default="", shell_complete=complete_worker, help="The worker of this name."
    ),
    wait_option,
    timeout_option(600.0),
    why_option,
    json_option,
)


@click.command(cls=PlainCommand, help=LOAD, short_help="Load one.")
@_change_options
@click.pass_context
def load(
    ctx: click.Context,
    model: str,
    worker: str,
    waits: bool,
    timeout_s: float,
    why: str,
    as_json: bool,
) -> None:
    """Choose a worker, command it, and wait."""
    with opened(ctx.obj) as (connection, keys):
        view, desired_states = (
            read_yard(connection, keys),
            Signals(connection, keys).desired_states(),
        )
        find_model(view, desired_states.by_scope, model)
        name = find_worker(view, desired_states.by_scope, worker) if worker else ""
        held = [one.worker for one in _holders(view, model, name) if one.is_ready]
        sent, unacknowledged = [], []
        if not held:
            place = _place(view, model, name)
            command = Command(
                verb="load",
                worker=place.worker,
                model=model,
                devices=list(place.devices),
                why=why or "requested by an operator",
            )
            sent = send(Scripts(connection, keys), [(_name(view, place.worker), command)])
            unacknowledged = wait_for(connection, keys, sent, timeout_s) if waits else []
    where = ", ".join(held or [one.command.worker for one in sent])
    word = "loaded already" if held else "loaded" if waits else "is to be loaded"
    report(
        ctx,
        sent,
        unacknowledged,
        about={"verb": "load", "model": model, "redundant": bool(held), "waited": waits},
        as_json=as_json,
        done=f"{model}: {word} by {where}",
        timeout_s=timeout_s,
    )


def _place(view: YardView, model: str, name: str) -> LoadTarget:
    try:
        return place_at(view, model, name) if name else place_anywhere(view, model)
    except NoPlace as error:
        raise click.ClickException(str(error)) from error


@click.command(cls=PlainCommand, help=UNLOAD, short_help="Unload one.")
@_change_options
@click.pass_context
def unload(ctx: click.Context, /, **options: Any) -> None:
    """Command all workers that hold it."""
    _change(ctx, "unload", **options)


@click.command(cls=PlainCommand, help=SLEEP, short_help="Put its workers to sleep.")
@_change_options
@click.option(
    "--level", type=click.IntRange(1, 2), default=1, show_default=True, help="vLLM's sleep level."
)
@click.pass_context
def sleep(ctx: click.Context, /, level: int, **options: Any) -> None:
    """Command all that are ready with it."""
    _change(ctx, "sleep", level=level, **options)


@click.command(cls=PlainCommand, help=WAKE, short_help="Wake its workers.")
@_change_options
@click.pass_context
def wake(ctx: click.Context, /, **options: Any) -> None:
    """Command all that sleep with it."""
    _change(ctx, "wake", **options)


def _change(
    ctx: click.Context,
    verb: Change,
    *,
    model: str,
    worker: str,
    waits: bool,
    timeout_s: float,
    why: str,
    as_json: bool,
    level: int = 1,
) -> None:
    """Command the workers that hold a model, wait, and print the outcome."""
    with opened(ctx.obj) as (connection, keys):
        view, desired_states = (
            read_yard(connection, keys),
            Signals(connection, keys).desired_states(),
        )
        find_model(view, desired_states.by_scope, model)
        name = find_worker(view, desired_states.by_scope, worker) if worker else ""
        found = [one for one in _holders(view, model, name) if one.state in _FROM[verb]]
        reason = why or "requested by an operator"
        commands = [
            (
                _name(view, one.worker),
                Command(verb=verb, worker=one.worker, level=level, why=reason),
            )
            for one in found
        ]
        sent = send(Scripts(connection, keys), commands)
        unacknowledged = wait_for(connection, keys, sent, timeout_s) if waits else []
    who = ", ".join(one.worker for one in found)
    word = f"{_DONE[verb]}: {who}" if waits else f"{verb} is commanded: {who}"
    report(
        ctx,
        sent,
        unacknowledged,
        about={"verb": verb, "model": model, "redundant": not found, "waited": waits},
        as_json=as_json,
        done=f"{model}: {word if found else _NOBODY[verb]}",
        timeout_s=timeout_s,
    )


def _holders(view: YardView, model: str, name: str) -> Sequence[WorkerView]:
    """The workers that hold a model, or the named one of them, without followers."""
    return [
        one
        for one in view.living
        if one.info and one.info.model == model and one.state != "attached"
        if name in {"", one.info.name}
    ]


def _name(view: YardView, worker: str) -> str:
    """A worker's name without its incarnation."""
    return next(one.info.name for one in view.workers if one.worker == worker and one.info)
