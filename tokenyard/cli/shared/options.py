"""Options that several commands share, and the question before something is ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tokenyard.cli.completion import COMPLETE
from tokenyard.protocol.keys import PRIORITY_CLASSES, PriorityClass
from tokenyard.protocol.parse import BadJson, ForeignJson
from tokenyard.protocol.texts import span_ms

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
#: Adds an option or an argument to a command.
AddOption = Callable[[Any], Any]


def with_options(*options: AddOption) -> Callable[[CommandT], CommandT]:
    """A decorator that adds options to a command, in this order."""

    def add(command: CommandT) -> CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _named_values(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``name=value`` pairs; a value that is not JSON is text."""
    params = {}
    for pair in values:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r}: give name=value")
        try:
            params[name.replace("-", "_")] = ForeignJson[Any]().decode(value)
        except BadJson:
            params[name.replace("-", "_")] = value
    return params


def milliseconds(text: str) -> int:
    """The type of an option: a time like 90s, 15m, 24h or 7d."""
    try:
        return span_ms(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def param_option(text: str) -> Callable[[CommandT], CommandT]:
    """``--param name=JSON``, which may be repeated."""
    return click.option("--param", "params", multiple=True, callback=_named_values, help=text)


def class_option(default: PriorityClass) -> Callable[[CommandT], CommandT]:
    """``--class`` of a command that submits requests."""
    return click.option(
        "--class",
        "priority_class",
        type=click.Choice(PRIORITY_CLASSES),
        default=default,
        show_default=True,
        help="The priority class of the requests.",
    )


def name_option(noun: str, text: str) -> Callable[[CommandT], CommandT]:
    """An option with the name of a model, a worker or a tenant, which the shell completes."""
    return click.option(f"--{noun}", default="", shell_complete=COMPLETE[noun], help=text)


yes_option = click.option("--yes", "is_sure", is_flag=True, help="Do not ask first.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
limit_option = click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most."
)
verbose_option = click.option("--verbose", is_flag=True, help="Show all columns.")


def json_list_option(what: str) -> Callable[[CommandT], CommandT]:
    """``--json`` of a command that lists things."""
    text = f"Print one JSON array, {what} on each line."
    return click.option("--json", "as_json", is_flag=True, help=text)


def ask_first(question: str, *, is_sure: bool) -> None:
    """Ask, unless ``--yes`` is given; "no" ends the command with status 1.

    Raises `click.UsageError` without a terminal, so that scripts give ``--yes``.
    """
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is no terminal to ask on: give --yes")
    click.confirm(question, abort=True, err=True)
