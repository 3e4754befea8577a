"""What the command lines share: options made from settings, and errors as one line and a status.

The only file below `tokenyard.cli` that knows click, because `python -m coordinator` and
`python -m worker` take the same options as `tokenyard coordinator` and `tokenyard worker`.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, TypeVar

import click
import redis
from click.core import ParameterSource
from setproctitle import setproctitle

from tokenyard.errors import (
    DeadlineUnmeetable,
    InvalidRequest,
    RequestFailed,
    SettingsError,
    TokenyardError,
    UnknownRequest,
    WaitTimeout,
)
from tokenyard.garbage import collect_seldom
from tokenyard.settings import CoordinatorSettings, WorkerSettings

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
YARD_DEFAULT: Final = "main"
REDIS_URL_HELP: Final = (
    "URL of the broker: redis:// or unix://; rediss:// with TLS; redis+sentinel:// and"
    " redis+cluster:// (or rediss+...) with several hosts."
)


class Exit(enum.IntEnum):
    """Exit statuses of every command."""

    OK = 0
    FAILED = 1  # a request, or the command itself
    USAGE = 2
    #: No broker or no coordinator, or they cannot be used; or workers that have not obeyed.
    UNAVAILABLE = 3
    TIMEOUT = 4


def exit_for(error: Exception) -> Exit:
    """The exit status that stands for ``error``."""
    match error:
        case WaitTimeout():
            return Exit.TIMEOUT
        case SettingsError() | InvalidRequest():
            return Exit.USAGE
        case RequestFailed() | UnknownRequest() | DeadlineUnmeetable():
            return Exit.FAILED
        case _:
            return Exit.UNAVAILABLE


@dataclasses.dataclass(frozen=True, slots=True)
class YardChoice:
    """Which yard a command is about, and where; given to `tokenyard` itself."""

    redis_url: str
    yard: str
    debug: bool


class PlainCommand(click.Command):
    """A command whose expected errors are one line, unless ``--debug`` is given."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except (TokenyardError, redis.RedisError) as error:
            choice = ctx.find_object(YardChoice)
            if ctx.params.get("debug") or (choice is not None and choice.debug):
                raise
            for line in error.faults if isinstance(error, SettingsError) else [error]:
                click.echo(f"Error: {line}", err=True)
            ctx.exit(exit_for(error))


def _from_group(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """What `tokenyard` was given holds, unless the command itself was given something else."""
    choice = ctx.find_object(YardChoice)
    name = str(param.name)
    if choice is None or ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return value
    return getattr(choice, name)


def _yard_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--redis-url"],
            envvar="TOKENYARD_REDIS_URL",
            show_envvar=True,
            callback=_from_group,
            help=REDIS_URL_HELP,
        ),
        click.Option(
            ["--yard"],
            envvar="TOKENYARD_YARD",
            show_envvar=True,
            default=YARD_DEFAULT,
            show_default=True,
            callback=_from_group,
            help="Name of the yard.",
        ),
        click.Option(
            ["--debug"],
            is_flag=True,
            callback=_from_group,
            help="Log everything, and show tracebacks.",
        ),
    ]


SettingsT = TypeVar("SettingsT", CoordinatorSettings, WorkerSettings)


def program(
    name: str,
    settings_type: type[SettingsT],
    run: Callable[[SettingsT], int],
    *,
    about: str,
    texts: Mapping[str, str],
) -> click.Command:
    """The command line of one long-lived program.

    Each field of ``settings_type`` is an option, explained in ``texts``, and a variable
    ``TOKENYARD_<PROGRAM>_<FIELD>``. ``run`` gets the settings and returns the exit status.
    """

    def start(redis_url: str | None, yard: str, debug: bool, **given: Any) -> None:
        if not redis_url:
            raise click.UsageError("give --redis-url or set TOKENYARD_REDIS_URL")
        values = {field: value for field, value in given.items() if value is not None}
        settings = settings_type(redis_url=redis_url, yard=yard, **values)
        start_logging(debug=debug)
        setproctitle(f"tokenyard {name} {yard}")
        collect_seldom()
        sys.exit(run(settings))

    return PlainCommand(
        name,
        callback=start,
        params=[*_yard_options(), *_settings_options(settings_type, texts, _prefix(name))],
        help=about,
        epilog=f"Each option can also be set by a variable: {_prefix(name)}_<OPTION>.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def _prefix(name: str) -> str:
    return f"TOKENYARD_{name.upper()}"


def start_logging(*, debug: bool = False) -> None:
    """Log to standard error, in the one form that `tokenyard up` reads."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, format=LOG_FORMAT)


def _settings_options(
    settings_type: type[SettingsT], texts: Mapping[str, str], prefix: str
) -> Iterator[click.Option]:
    hints = typing.get_type_hints(settings_type)
    for field in dataclasses.fields(settings_type):
        if field.name in {"redis_url", "yard"}:
            continue
        # A default that says nothing to a reader is left to the settings themselves.
        is_plain = field.default is not dataclasses.MISSING and field.default not in {"", ()}
        yield click.Option(
            [_flag(field.name, hints[field.name])],
            type=_parameter_type(hints[field.name]),
            default=field.default if is_plain else None,
            show_default=True,
            envvar=f"{prefix}_{field.name.upper()}",
            help=texts[field.name],
        )


def _flag(name: str, hint: Any) -> str:
    flag = name.replace("_", "-")
    return f"--{flag}/--no-{flag}" if hint is bool else f"--{flag}"


def _parameter_type(hint: Any) -> Any:
    """How click reads a setting of this type."""
    if typing.get_origin(hint) is Literal:
        return click.Choice(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return words
    if hint in {int, float, str, bool}:
        return hint
    if isinstance(hint, UnionType) and Path in typing.get_args(hint):
        return click.Path(path_type=Path)
    raise TypeError(f"no option for a setting of type {hint}")


def words(text: str) -> tuple[str, ...]:
    """Several words in one option: ``0,1``."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
