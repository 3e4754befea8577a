"""Makes a command of an operation: its options, its question, its output and its exit status."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final

import click
import msgspec

from tokenyard.cli.completion import COMPLETE
from tokenyard.cli.shared import options
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.request_owner import owner_of
from tokenyard.ops.audit import COMMAND_LINE
from tokenyard.ops.control import Unacknowledged
from tokenyard.ops.names import request_name
from tokenyard.ops.operation import MOST_WHOLE, Caller, Operation, Outcome, Parameter, carry_out
from tokenyard.process.home import user_name
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.process.settings_options import words
from tokenyard.protocol.control import ALL, model_scope, worker_scope
from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import counted

_STATUSES: Final = """

Exit statuses:
  0  {done}, or nothing to change
  1  not possible now, or no such name{no}"""
_SCOPE: Final = ("for_all", "model", "worker")
#: Options that are named otherwise than the parameter.
_METAVARS: Final = {"epoch": "N"}


def command(
    op: Operation,
    name: str,
    short_help: str,
    *,
    arguments: Iterable[str] = (),
    timeout_s: float = 0.0,
    asks: bool = False,
) -> PlainCommand:
    """The command of an operation.

    ``arguments`` are the parameters that have no option. ``timeout_s``: workers have to obey, and
    it waits so long by default. ``asks``: it has ``--yes``, since it may ask first.
    """
    named = set(arguments)
    # Arguments are named in the order of their use.
    ordered = sorted(op.parameters, key=lambda one: one.type is not tuple and one.name not in named)
    added = [option for one in ordered for option in _options(one, is_argument=one.name in named)]
    added += _waiting(timeout_s) if timeout_s else []
    added += [options.yes_option] if asks else []
    help_text = (inspect.getdoc(op.run) or "") + _statuses(waits=bool(timeout_s), asks=asks)

    @click.command(name, cls=PlainCommand, help=help_text, short_help=short_help)
    @options.with_options(*added, *_CALLER, options.json_option)
    @click.pass_context
    def run(ctx: click.Context, /, **given: Any) -> None:
        _run(ctx, op, given)

    return run


def _statuses(*, waits: bool, asks: bool) -> str:
    no = ", or the answer to the question is no" if asks else ""
    text = _STATUSES.format(done="all have obeyed" if waits else "done", no=no)
    if asks:
        text += "\n  2  without a terminal to ask on, --yes is needed"
    more = ", or workers that have not obeyed, which are named" if waits else ""
    return f"{text}\n  3  no broker{more}"


def _options(one: Parameter, *, is_argument: bool) -> list[options.AddOption]:
    if one.field.noun == "scope":
        return [
            click.option("--all", "for_all", is_flag=True, help="All workers; the default."),
            options.name_option("model", "The workers that hold this model."),
            options.name_option("worker", "The worker of this name."),
        ]
    if one.field.is_hidden:
        return []
    complete = COMPLETE.get(one.field.noun)
    if one.type is tuple:
        must = one.is_required
        named = "ID" if one.field.noun == "request" else one.name.upper()
        several = f"{named}..." if must else f"[{named}...]"
        return [
            click.argument(
                one.name, nargs=-1, required=must, metavar=several, shell_complete=complete
            )
        ]
    kind = _kind(one)
    if is_argument:
        metavar = _METAVARS.get(one.name)
        return [click.argument(one.name, type=kind, metavar=metavar, shell_complete=complete)]
    return [
        click.option(
            one.flag,
            *(["-a"] if one.name == "all" else []),
            one.name,
            type=None if one.type is bool else kind,
            is_flag=one.type is bool,
            required=one.is_required,
            metavar="WORDS" if one.type is list else None,
            default=None if one.is_required else one.default,
            show_default=one.default is not None and (bool(one.choices) or one.type is int),
            shell_complete=complete,
            help=". ".join(filter(None, (one.field.label, one.field.hint))),
        )
    ]


def _kind(one: Parameter) -> Any:
    """The type of an option as click has it."""
    if one.choices:
        return click.Choice(one.choices)
    most = None if one.field.most == MOST_WHOLE else one.field.most
    if one.type is int:
        return click.IntRange(int(one.field.least), None if most is None else int(most))
    if one.type is float:
        return click.FloatRange(one.field.least, most)
    return _words if one.type is list else one.type


def _words(text: str) -> list[str]:
    """Words with commas."""
    return list(words(text))


def _waiting(timeout_s: float) -> list[options.AddOption]:
    return [
        click.option(
            "--wait/--no-wait",
            "waits",
            default=True,
            show_default=True,
            help="Wait until all have obeyed.",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(0),
            default=timeout_s,
            show_default=True,
            help="Seconds to wait until all have obeyed.",
        ),
    ]


def operator() -> str:
    """The user who runs this, as ``user@host``."""
    return f"{user_name()}@{socket.gethostname()}"


_CALLER: Final = (
    click.option("--why", default="", help="Reason, for the audit."),
    click.option(
        "--by",
        envvar="TOKENYARD_OPERATOR",
        show_envvar=True,
        default=operator,
        show_default="user@host",
        help="The operator, for the audit.",
    ),
)


def _run(ctx: click.Context, op: Operation, given: dict[str, Any]) -> None:
    why, by, as_json = (given.pop(name) for name in ("why", "by", "as_json"))
    waits, timeout_s = given.pop("waits", False), given.pop("timeout_s", 0.0)
    is_sure = given.pop("is_sure", None)
    if any(one.field.noun == "scope" for one in op.parameters):
        given["scope"] = _scope(*(given.pop(name) for name in _SCOPE))
    caller = Caller(by or operator(), COMMAND_LINE, why)
    with opened(ctx.obj) as yard:
        if given.get("request"):
            given["request"] = _requests(yard, given["request"], given.pop("client"))
        if is_sure is False:
            preview = op.preview(yard, caller, **given)
            if preview.needs_yes and not preview.count:
                say(preview.text)
                ctx.exit(Exit.OK)
            if preview.needs_yes:
                options.ask_first(f"Yard {ctx.obj.yard!r}: {preview.text} Go on?", is_sure=is_sure)
        try:
            done = carry_out(yard, op, caller, given)
        except BadInput as error:
            raise _usage(op, error) from error
        outcome = done.outcome
        left = outcome.wait(timeout_s) if waits and outcome.wait else ()
    if done.unrecorded:
        say(f"Warning: this is not in the audit: {done.unrecorded}", err=True)
    if as_json:
        more = {"waited": waits, "unacknowledged": left} if outcome.wait else {}
        say(msgspec.json.encode({**outcome.fields, **more}))
    else:
        _say(outcome, left, waits=waits, timeout_s=timeout_s)
    ctx.exit(Exit.UNAVAILABLE if left else Exit.FAILED if outcome.is_partial else Exit.OK)


def _usage(op: Operation, error: BadInput) -> click.UsageError:
    """The error as click says it, with the option that is wrong."""
    text = str(error).removeprefix(f"{error.field}: ")
    found = [one for one in op.parameters if one.name == error.field]
    return click.BadParameter(text, param_hint=found[0].flag) if found else click.UsageError(text)


def _requests(yard: Yard, ids: Sequence[str], client: str) -> tuple[str, ...]:
    """The requests of these ids, each with its client; raises `click.UsageError`."""
    return tuple(request_name(owner_of(yard, one, client or None), one) for one in ids)


def _scope(for_all: bool, model: str, worker: str) -> str:
    if sum(map(bool, (for_all, model, worker))) > 1:
        raise click.UsageError("give one of --all, --model and --worker")
    if model:
        return model_scope(model)
    return worker_scope(worker) if worker else ALL


def _say(
    outcome: Outcome, left: Sequence[Unacknowledged], *, waits: bool, timeout_s: float
) -> None:
    if outcome.secret:
        say(outcome.secret)
        say(f"{outcome.text}. Keep it: it cannot be shown again.", err=True)
    elif not (waits and outcome.wait):
        say(outcome.text)
    elif not left or outcome.done == outcome.text:  # the same: there was nothing to change
        say(outcome.done)
    if left:
        _say_unacknowledged(left, timeout_s)
    for note in outcome.notes:
        say(note)


def _say_unacknowledged(unacknowledged: Sequence[Unacknowledged], timeout_s: float) -> None:
    """Print the workers that have not obeyed, and why."""
    is_over = any(not one.reason for one in unacknowledged)
    after = f" after {timeout_s:g} s" if is_over else ""
    have = "has" if len(unacknowledged) == 1 else "have"
    say(f"Error: {counted(len(unacknowledged), 'worker')} {have} not obeyed{after}:", err=True)
    for one in unacknowledged:
        say(f"  {one.name} ({one.worker}): {one.reason or 'has not answered'}", err=True)
