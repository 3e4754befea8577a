"""What the commands that give a signal share: their options, giving it, waiting, and saying so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click
import msgspec

from tokenyard.admin.pauses import Pause, all_pauses
from tokenyard.admin.signals import SignalReceipt, Signals, Unacknowledged
from tokenyard.admin.snapshot import YardView, read_yard
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.names import find_scope, living
from tokenyard.cli.shared.operator import operator
from tokenyard.cli.shared.options import with_options
from tokenyard.process.program import Exit
from tokenyard.protocol.control import (
    ALL,
    DesiredStates,
    Invalid,
    Order,
    Signal,
    model_scope,
    said,
    worker_scope,
)
from tokenyard.protocol.texts import counted

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
#: What to do first, where a signal is not allowed.
_FIRST: Final[Mapping[Signal, str]] = {
    "UNPAUSE": "resume",
    "SUSPEND": "pause",
    "START_PROFILE": "resume",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the options say that all signals have."""

    for_all: bool
    model: str
    worker: str
    waits: bool
    timeout_s: float
    why: str
    by: str
    as_json: bool

    def __post_init__(self) -> None:
        if sum(map(bool, (self.for_all, self.model, self.worker))) > 1:
            raise click.UsageError("give one of --all, --model and --worker")

    @property
    def scope_options(self) -> str:
        """The options that name the scope, for a command line that is proposed."""
        if self.model:
            return f" --model {self.model}"
        return f" --worker {self.worker}" if self.worker else ""


wait_option = click.option(
    "--wait/--no-wait",
    "waits",
    default=True,
    show_default=True,
    help="Wait until all have obeyed.",
)


def timeout_option(default_s: float) -> Callable[[CommandT], CommandT]:
    """How long to wait for those who have to obey."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0),
        default=default_s,
        show_default=True,
        help="Seconds to wait until all have obeyed.",
    )


why_option = click.option("--why", default="", help="Why, in words; for the logs.")
why_paused_option = click.option(
    "--why", default="", help="Why, in words; for the logs, and for all who see the pause."
)
by_option = click.option(
    "--by",
    envvar="TOKENYARD_OPERATOR",
    show_envvar=True,
    default=operator,
    show_default="user@host",
    help="Who says so; shown with a pause.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
#: Those of `Asked`.
order_options: Final = with_options(
    click.option("--all", "for_all", is_flag=True, help="All workers; the default."),
    click.option("--model", default="", help="The workers that hold this model."),
    click.option("--worker", default="", help="The worker of this name."),
    wait_option,
    timeout_option(120.0),
    why_paused_option,
    by_option,
    json_option,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a signal."""

    given: SignalReceipt
    holdouts: Sequence[Unacknowledged]
    others: Sequence[Pause]  # of other scopes that hold workers of this one
    now_ms: int  # by the server's clock


def give(
    ctx: click.Context, asked: Asked, signal: Signal, done: str, already: str = "", **more: Any
) -> None:
    """Give a signal, wait, say what came of it, and end.

    ``done`` says how things are where all obeyed, ``already`` where nothing was to change.
    """
    outcome = _give(ctx, asked, signal, more)
    if asked.as_json:
        say(msgspec.json.encode(_fields(outcome, asked)))
    else:
        _say(outcome, asked, done, already or f"{done} already")
    ctx.exit(Exit.UNAVAILABLE if outcome.holdouts else Exit.OK)


def _give(ctx: click.Context, asked: Asked, signal: Signal, more: Mapping[str, Any]) -> Outcome:
    with opened(ctx.obj) as (connection, keys):
        signals = Signals(connection, keys)
        view = read_yard(connection, keys)
        scope = find_scope(view, signals.desired_states().by_scope, asked.model, asked.worker)
        try:
            given = signals.give(
                Order(signal=signal, scope=scope, why=asked.why, by=asked.by, **more)
            )
        except Invalid as fault:
            raise click.ClickException(f"{fault}{_first(signal, asked)}") from fault
        holdouts = signals.wait(given, asked.timeout_s) if asked.waits else []
        others = _held_by_others(view, signals.desired_states(), scope)
        return Outcome(given, holdouts, others, view.at_ms)


def _first(signal: Signal, asked: Asked) -> str:
    verb = _FIRST.get(signal)
    return f" (tokenyard {verb}{asked.scope_options})" if verb else ""


def _held_by_others(view: YardView, desired_states: DesiredStates, scope: str) -> list[Pause]:
    """The other scopes that keep workers of this one from running."""
    related = {ALL}
    for worker in living(view):
        if worker.info:
            scopes = {ALL, worker_scope(worker.info.name)}
            scopes |= {model_scope(worker.info.model)} if worker.info.model else set()
            related |= scopes if scope in scopes else set()
    if scope == ALL:
        related |= set(desired_states.by_scope)
    return [one for one in all_pauses(desired_states) if one.scope in related - {scope}]


def _fields(outcome: Outcome, asked: Asked) -> dict[str, Any]:
    given = outcome.given
    return {
        "signal": given.order.signal,
        "scope": given.order.scope,
        "ids": list(given.ids),
        "redundant": given.is_redundant,
        "waited": asked.waits,
        "workers": list(given.workers),
        "holdouts": holdout_fields(outcome.holdouts),
        "others": {one.scope: one.run_state for one in outcome.others},
    }


def holdout_fields(holdouts: Sequence[Unacknowledged]) -> list[dict[str, str]]:
    """Those who have not obeyed, for JSON."""
    return [{"worker": one.worker, "name": one.name, "reason": one.reason} for one in holdouts]


def _say(outcome: Outcome, asked: Asked, done: str, already: str) -> None:
    given, scope = outcome.given, said(outcome.given.order.scope)
    if given.order.signal in {"DRAIN", "STOP"} and not given.workers:
        say(f"{scope}: nobody is there")
    elif given.is_redundant:
        say(f"{scope}: {already}")
    elif not asked.waits:
        say(f"{scope}: {given.order.signal} is given")
    elif not outcome.holdouts:
        say(f"{scope}: {done}")
    if outcome.holdouts:
        say_holdouts(outcome.holdouts, asked.timeout_s)
    if given.order.signal == "UNPAUSE":
        for other in outcome.others:
            say(f"still {other.run_state}: {said(other.scope)}{other.detail(outcome.now_ms)}")


def say_holdouts(holdouts: Sequence[Unacknowledged], timeout_s: float) -> None:
    """Who has not obeyed, and why."""
    is_over = any(not one.reason for one in holdouts)
    after = f" after {timeout_s:g} s" if is_over else ""
    say(f"Error: {_workers(len(holdouts))} not obeyed{after}:", err=True)
    for one in holdouts:
        say(f"  {one.name} ({one.worker}): {one.reason or 'has not answered'}", err=True)


def _workers(count: int) -> str:
    return f"{counted(count, 'worker')} {'has' if count == 1 else 'have'}"
