"""Gives a control signal for a command: options, waiting, and output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click
import msgspec

from tokenyard.admin.pauses import Pause
from tokenyard.admin.scopes import other_pauses
from tokenyard.admin.signals import SignalReceipt, Signals, Unacknowledged
from tokenyard.admin.snapshot import read_yard
from tokenyard.cli.shared.auditing import note, operator
from tokenyard.cli.shared.completion import complete_model, complete_worker
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.names import find_scope
from tokenyard.cli.shared.options import with_options
from tokenyard.process.program import Exit
from tokenyard.protocol.control import (
    PAUSE_MODES,
    Invalid,
    Order,
    Signal,
    said,
)
from tokenyard.protocol.texts import counted

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
#: The command to run first if a signal is not allowed.
_FIRST: Final[Mapping[Signal, str]] = {"UNPAUSE": "resume", "SUSPEND": "pause"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalOptions:
    """The options that all signals have."""

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
        """The options of the scope, for a suggested command line."""
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
    """An option for the time to wait."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0),
        default=default_s,
        show_default=True,
        help="Seconds to wait until all have obeyed.",
    )


mode_option = click.option(
    "--mode",
    type=click.Choice(PAUSE_MODES),
    default="abort",
    show_default=True,
    help="What happens to running requests.",
)
why_option = click.option("--why", default="", help="Reason, for the logs.")
why_paused_option = click.option(
    "--why", default="", help="Reason, for the logs and shown with the pause."
)
by_option = click.option(
    "--by",
    envvar="TOKENYARD_OPERATOR",
    show_envvar=True,
    default=operator,
    show_default="user@host",
    help="The operator; shown with a pause.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
#: The options of `SignalOptions`.
order_options: Final = with_options(
    click.option("--all", "for_all", is_flag=True, help="All workers; the default."),
    click.option(
        "--model",
        default="",
        shell_complete=complete_model,
        help="The workers that hold this model.",
    ),
    click.option(
        "--worker", default="", shell_complete=complete_worker, help="The worker of this name."
    ),
    wait_option,
    timeout_option(120.0),
    why_paused_option,
    by_option,
    json_option,
)


@dataclass(frozen=True, slots=True)
class SignalOutcome:
    """The outcome of a signal."""

    receipt: SignalReceipt
    unacknowledged: Sequence[Unacknowledged]
    others: Sequence[Pause]  # pauses of other scopes that hold workers of this one
    now_ms: int  # by the server's clock


def give(
    ctx: click.Context,
    options: SignalOptions,
    signal: Signal,
    done: str,
    already: str = "",
    **more: Any,
) -> None:
    """Give a signal, wait, print the outcome, and exit.

    ``done`` is printed if all obeyed, ``already`` if there was nothing to change.
    """
    outcome = _give(ctx, options, signal, more)
    if options.as_json:
        say(msgspec.json.encode(_fields(outcome, options)))
    else:
        _say(outcome, options, done, already or f"{done} already")
    ctx.exit(Exit.UNAVAILABLE if outcome.unacknowledged else Exit.OK)


def _give(
    ctx: click.Context, options: SignalOptions, signal: Signal, more: Mapping[str, Any]
) -> SignalOutcome:
    with opened(ctx.obj) as yard:
        signals = Signals(yard)
        view = read_yard(yard)
        scope = find_scope(view, signals.desired_states().by_scope, options.model, options.worker)
        try:
            receipt = signals.give(
                Order(signal=signal, scope=scope, why=options.why, by=options.by, **more)
            )
        except Invalid as error:
            raise click.ClickException(f"{error}{_first(signal, options)}") from error
        if not receipt.is_redundant:
            note(
                yard,
                f"signal.{signal.lower()}",
                [said(scope)],
                f"{said(scope)}: {signal} is given",
                why=options.why,
                by=options.by,
            )
        unacknowledged = signals.wait(receipt, options.timeout_s) if options.waits else []
        others = other_pauses(view.living, signals.desired_states(), scope)
        return SignalOutcome(receipt, unacknowledged, others, view.at_ms)


def _first(signal: Signal, options: SignalOptions) -> str:
    verb = _FIRST.get(signal)
    return f" (tokenyard {verb}{options.scope_options})" if verb else ""


def _fields(outcome: SignalOutcome, options: SignalOptions) -> dict[str, Any]:
    receipt = outcome.receipt
    return {
        "signal": receipt.order.signal,
        "scope": receipt.order.scope,
        "ids": list(receipt.ids),
        "redundant": receipt.is_redundant,
        "waited": options.waits,
        "workers": list(receipt.workers),
        "unacknowledged": unacknowledged_fields(outcome.unacknowledged),
        "others": {one.scope: one.run_state for one in outcome.others},
    }


def unacknowledged_fields(unacknowledged: Sequence[Unacknowledged]) -> list[dict[str, str]]:
    """The workers that have not obeyed, for JSON."""
    return [
        {"worker": one.worker, "name": one.name, "reason": one.reason} for one in unacknowledged
    ]


def _say(outcome: SignalOutcome, options: SignalOptions, done: str, already: str) -> None:
    receipt, scope = outcome.receipt, said(outcome.receipt.order.scope)
    if receipt.order.signal in {"DRAIN", "STOP"} and not receipt.workers:
        say(f"{scope}: no worker is live")
    elif receipt.is_redundant:
        say(f"{scope}: {already}")
    elif not options.waits:
        say(f"{scope}: {receipt.order.signal} is given")
    elif not outcome.unacknowledged:
        say(f"{scope}: {done}")
    if outcome.unacknowledged:
        say_unacknowledged(outcome.unacknowledged, options.timeout_s)
    if receipt.order.signal == "UNPAUSE":
        for other in outcome.others:
            say(f"still {other.run_state}: {said(other.scope)}{other.detail(outcome.now_ms)}")


def say_unacknowledged(unacknowledged: Sequence[Unacknowledged], timeout_s: float) -> None:
    """Print the workers that have not obeyed, and why."""
    is_over = any(not one.reason for one in unacknowledged)
    after = f" after {timeout_s:g} s" if is_over else ""
    say(f"Error: {_workers(len(unacknowledged))} not obeyed{after}:", err=True)
    for one in unacknowledged:
        say(f"  {one.name} ({one.worker}): {one.reason or 'has not answered'}", err=True)


def _workers(count: int) -> str:
    return f"{counted(count, 'worker')} {'has' if count == 1 else 'have'}"
