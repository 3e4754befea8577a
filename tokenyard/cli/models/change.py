"""`tokenyard models load`, `unload`, `sleep`, `wake`: commands to workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from tokenyard.admin.model_commands import (
    Change,
    ModelPlan,
    plan_change,
    plan_load,
    send,
    wait_for,
)
from tokenyard.admin.model_placement import NoPlace
from tokenyard.admin.signals import Signals
from tokenyard.admin.snapshot import YardView, read_yard
from tokenyard.cli.models.command_report import report
from tokenyard.cli.shared.auditing import note
from tokenyard.cli.shared.completion import complete_model, complete_worker
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.names import find_model, find_worker
from tokenyard.cli.shared.options import with_options
from tokenyard.cli.shared.signal_options import json_option, timeout_option, wait_option, why_option
from tokenyard.process.program import PlainCommand
from tokenyard.scripts import Scripts

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

    def plan(view: YardView, model: str, name: str) -> ModelPlan:
        try:
            return plan_load(view, model, name)
        except NoPlace as error:
            raise click.ClickException(str(error)) from error

    _command(ctx, "load", plan, **options)


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

    def plan(view: YardView, model: str, name: str) -> ModelPlan:
        return plan_change(view, verb, model, name, level)

    _command(ctx, verb, plan, **options)


def _command(
    ctx: click.Context,
    verb: str,
    plan: Callable[[YardView, str, str], ModelPlan],
    *,
    model: str,
    worker: str,
    waits: bool,
    timeout_s: float,
    why: str,
    as_json: bool,
) -> None:
    """Send the commands of ``plan``, wait, and print the outcome."""
    with opened(ctx.obj) as yard:
        view = read_yard(yard)
        scopes = Signals(yard).desired_states().by_scope
        find_model(view, scopes, model)
        name = find_worker(view, scopes, worker) if worker else ""
        chosen = plan(view, model, name)
        reason = why or "requested by an operator"
        sent = send(Scripts(yard), view, chosen.commands, reason)
        if sent:
            note(yard, f"model.{verb}", [model], f"{model}: {chosen.sent}", why=why)
        unacknowledged = wait_for(yard, sent, timeout_s) if waits else []
    report(
        ctx,
        sent,
        unacknowledged,
        about={"verb": verb, "model": model, "redundant": not sent, "waited": waits},
        as_json=as_json,
        done=f"{model}: {chosen.done if waits or not sent else chosen.sent}",
        timeout_s=timeout_s,
    )
