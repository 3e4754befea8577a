"""`tokenyard models load`, `unload`, `sleep`, `wake`: commands to workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import click
import msgspec

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
#: Commands, what is said when all have obeyed (or none is needed), and when nobody waits.
Choice = tuple[list[Command], str, str]

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
def load(ctx: click.Context, /, **options: Any) -> None:
    """Choose a worker, command it, and wait."""

    def choose(view: YardView, model: str, name: str) -> Choice:
        held = [one.worker for one in _holders(view, model, name) if one.is_ready]
        if held:
            return [], f"loaded already by {', '.join(held)}", ""
        place = _place(view, model, name)
        command = Command(
            verb="load", worker=place.worker, model=model, devices=list(place.devices)
        )
        return [command], f"loaded by {place.worker}", f"is to be loaded by {place.worker}"

    _command(ctx, "load", choose, **options)


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


def _change(ctx: click.Context, verb: Change, *, level: int = 1, **options: Any) -> None:
    """Command the workers that hold a model."""

    def choose(view: YardView, model: str, name: str) -> Choice:
        found = [one for one in _holders(view, model, name) if one.state in _FROM[verb]]
        commands = [Command(verb=verb, worker=one.worker, level=level) for one in found]
        who = ", ".join(one.worker for one in found)
        done = f"{_DONE[verb]}: {who}" if found else _NOBODY[verb]
        return commands, done, f"{verb} is commanded: {who}"

    _command(ctx, verb, choose, **options)


def _command(
    ctx: click.Context,
    verb: str,
    choose: Callable[[YardView, str, str], Choice],
    *,
    model: str,
    worker: str,
    waits: bool,
    timeout_s: float,
    why: str,
    as_json: bool,
) -> None:
    """Send the commands that ``choose`` makes, wait, and print the outcome."""
    with opened(ctx.obj) as (connection, keys):
        view = read_yard(connection, keys)
        scopes = Signals(connection, keys).desired_states().by_scope
        find_model(view, scopes, model)
        name = find_worker(view, scopes, worker) if worker else ""
        commands, done, sent_only = choose(view, model, name)
        reason = why or "requested by an operator"
        named = [
            (_name(view, one.worker), msgspec.structs.replace(one, why=reason)) for one in commands
        ]
        sent = send(Scripts(connection, keys), named)
        unacknowledged = wait_for(connection, keys, sent, timeout_s) if waits else []
    report(
        ctx,
        sent,
        unacknowledged,
        about={"verb": verb, "model": model, "redundant": not sent, "waited": waits},
        as_json=as_json,
        done=f"{model}: {done if waits or not sent else sent_only}",
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
