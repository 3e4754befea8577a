"""`tokenyard models load`, `unload`, `sleep`, `wake`: commands to workers, given by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import click

from tokenyard.admin.signals import Signals
from tokenyard.admin.snapshot import WorkerView, YardView, read_yard
from tokenyard.cli.shared.command_wait import report, tell, wait_for
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.names import find_model, find_worker, living
from tokenyard.cli.shared.options import with_options
from tokenyard.cli.shared.placing import place_anywhere, place_at
from tokenyard.cli.shared.signal_options import json_option, timeout_option, wait_option, why_option
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.commands import Command
from tokenyard.protocol.worker_info import WorkerState
from tokenyard.scripts import Scripts

Change = Literal["unload", "sleep", "wake"]

LOAD: Final = """Have a model loaded, by a worker of a host that may load it.

Without --worker it is one where the model sleeps, or whose device is free, or idle; nothing is done
where a worker holds the model. With --worker that one loads it: what runs there may finish
first, and what it held falls asleep or is unloaded.

\b
Examples:
  tokenyard models load adder
  tokenyard models load adder --worker gpu-1-0
  tokenyard models load adder --no-wait --json
"""
UNLOAD: Final = """Have workers let go of a model; what runs may finish first.

\b
Examples:
  tokenyard models unload adder
  tokenyard models unload adder --worker gpu-1-0
"""
SLEEP: Final = """Put the workers that hold a model to sleep; what runs may finish first.

\b
  --level 1  the weights are kept in the host's memory
  --level 2  nothing is kept, and waking reads the weights anew

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
#: States of a worker that can do it.
_FROM: Final[dict[Change, frozenset[WorkerState]]] = {
    "unload": frozenset({"loading", "ready", "asleep"}),
    "sleep": frozenset({"ready"}),
    "wake": frozenset({"asleep"}),
}
_DONE: Final[dict[Change, str]] = {"unload": "unloaded", "sleep": "asleep", "wake": "awake"}
_NOBODY: Final[dict[Change, str]] = {
    "unload": "nobody holds it",
    "sleep": "nobody has it ready",
    "wake": "nobody sleeps with it",
}
_change_options: Final = with_options(
    click.argument("model"),
    click.option("--worker", default="", help="The worker of this name."),
    wait_option,
    timeout_option(600.0),
    why_option,
    json_option,
)


@click.command(cls=PlainCommand, help=LOAD, short_help="Have one loaded.")
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
    """Find a place, command, and wait."""
    with opened(ctx.obj) as (connection, keys):
        view, desired_states = (
            read_yard(connection, keys),
            Signals(connection, keys).desired_states(),
        )
        find_model(view, desired_states.by_scope, model)
        name = find_worker(view, desired_states.by_scope, worker) if worker else ""
        held = [one.worker for one in _holders(view, model, name) if one.is_ready]
        told, holdouts = [], []
        if not held:
            place = place_at(view, model, name) if name else place_anywhere(view, model)
            command = Command(
                verb="load",
                worker=place.worker,
                model=model,
                devices=list(place.devices),
                why=why or "an operator wants it",
            )
            told = tell(Scripts(connection, keys), [(_name(view, place.worker), command)])
            holdouts = wait_for(connection, keys, told, timeout_s) if waits else []
    where = ", ".join(held or [one.command.worker for one in told])
    word = "loaded already" if held else "loaded" if waits else "is to be loaded"
    report(
        ctx,
        told,
        holdouts,
        about={"verb": "load", "model": model, "redundant": bool(held), "waited": waits},
        as_json=as_json,
        done=f"{model}: {word} by {where}",
        timeout_s=timeout_s,
    )


@click.command(cls=PlainCommand, help=UNLOAD, short_help="Have one unloaded.")
@_change_options
@click.pass_context
def unload(ctx: click.Context, /, **asked: Any) -> None:
    """Command all holders."""
    _change(ctx, "unload", **asked)


@click.command(cls=PlainCommand, help=SLEEP, short_help="Put its workers to sleep.")
@_change_options
@click.option(
    "--level", type=click.IntRange(1, 2), default=1, show_default=True, help="vLLM's sleep level."
)
@click.pass_context
def sleep(ctx: click.Context, /, level: int, **asked: Any) -> None:
    """Command all that are ready with it."""
    _change(ctx, "sleep", level=level, **asked)


@click.command(cls=PlainCommand, help=WAKE, short_help="Wake its workers.")
@_change_options
@click.pass_context
def wake(ctx: click.Context, /, **asked: Any) -> None:
    """Command all that sleep with it."""
    _change(ctx, "wake", **asked)


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
    """Command the workers that hold a model, wait, and say what came of it."""
    with opened(ctx.obj) as (connection, keys):
        view, desired_states = (
            read_yard(connection, keys),
            Signals(connection, keys).desired_states(),
        )
        find_model(view, desired_states.by_scope, model)
        name = find_worker(view, desired_states.by_scope, worker) if worker else ""
        found = [one for one in _holders(view, model, name) if one.state in _FROM[verb]]
        reason = why or "an operator wants it"
        commands = [
            (
                _name(view, one.worker),
                Command(verb=verb, worker=one.worker, level=level, why=reason),
            )
            for one in found
        ]
        told = tell(Scripts(connection, keys), commands)
        holdouts = wait_for(connection, keys, told, timeout_s) if waits else []
    who = ", ".join(one.worker for one in found)
    word = f"{_DONE[verb]}: {who}" if waits else f"{verb} is commanded: {who}"
    report(
        ctx,
        told,
        holdouts,
        about={"verb": verb, "model": model, "redundant": not found, "waited": waits},
        as_json=as_json,
        done=f"{model}: {word if found else _NOBODY[verb]}",
        timeout_s=timeout_s,
    )


def _holders(view: YardView, model: str, name: str) -> Sequence[WorkerView]:
    """The workers that hold a model, or the one of this name if it does; followers do not count."""
    return [
        one
        for one in living(view)
        if one.info and one.info.model == model and one.state != "attached"
        if name in {"", one.info.name}
    ]


def _name(view: YardView, worker: str) -> str:
    """A worker's name without its incarnation."""
    return next(one.info.name for one in view.workers if one.worker == worker and one.info)
