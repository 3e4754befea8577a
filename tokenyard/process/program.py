"""What the command lines share: a program's options, and errors as one line and a status.

Only this file and `settings_options` know click outside `tokenyard.cli`, because
`python -m coordinator` and `python -m worker` take the same options as `tokenyard coordinator` and
`tokenyard worker`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import click
import redis
from click.core import ParameterSource
from setproctitle import setproctitle

from tokenyard.broker.url import CREDENTIALS
from tokenyard.process.interpreter import collect_seldom, end_with_threads
from tokenyard.process.logs import start_logging
from tokenyard.process.running import URL_VARIABLE, YARD_DEFAULT, YARD_VARIABLE, broker_url
from tokenyard.process.settings_options import settings_options
from tokenyard.protocol.errors import (
    BadInput,
    DeadlineUnmeetable,
    IdReused,
    InvalidRequest,
    NotObeyed,
    QuotaExceeded,
    Refused,
    RequestFailed,
    SettingsError,
    StartFailed,
    TokenyardError,
    UnknownRequest,
    WaitTimeout,
)
from tokenyard.protocol.gateway_settings import BridgeSettings, GatewaySettings
from tokenyard.protocol.http_settings import BoardSettings
from tokenyard.protocol.keys import NAME_RULE, is_name
from tokenyard.protocol.settings import CoordinatorSettings, ProgramSettings, WorkerSettings
from tokenyard.protocol.texts import harmless, nearest

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
    #: The workers of a host cannot start; to try the same again does not help.
    START_FAILED = 5
    #: By Ctrl-C; of another signal it is 128 and its number.
    INTERRUPTED = 130


def exit_for(error: Exception) -> Exit:
    """The exit status that stands for ``error``."""
    match error:
        case WaitTimeout():
            return Exit.TIMEOUT
        case SettingsError() | InvalidRequest() | BadInput():
            return Exit.USAGE
        case NotObeyed():
            return Exit.UNAVAILABLE
        case StartFailed():
            return Exit.START_FAILED
        case Refused() | RequestFailed() | UnknownRequest() | DeadlineUnmeetable() | IdReused():
            return Exit.FAILED
        case QuotaExceeded(retry_after_s=None):
            return Exit.FAILED
        case OSError() if not isinstance(error, TokenyardError):  # a file, a full disk
            return Exit.FAILED
        case _:
            return Exit.UNAVAILABLE


@dataclasses.dataclass(frozen=True, slots=True)
class YardChoice:
    """Which yard a command is about, and where; given to `tokenyard` itself."""

    redis_url: str  # "" where none is given
    yard: str
    debug: bool
    as_json: bool = False  # asked for before the command


def _laid_out(text: str | None) -> str | None:
    """A help text with click's mark at each paragraph whose lines are to stay as they are."""
    if text is None:
        return None
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(f"\b\n{part}" if "\n  " in part else part for part in parts)


class PlainCommand(click.Command):
    """A command whose expected errors are one line, unless ``--debug`` is given.

    It also accepts the options of `tokenyard` itself (``--yard``, ...) after its name. ``reads``
    names the programs whose variables `TOKENYARD_*` set its options.
    """

    reads: tuple[str, ...] = ()

    def __init__(
        self,
        name: str | None = None,
        *,
        help: str | None = None,  # noqa: A002 - the name is click's
        **more: Any,
    ) -> None:
        super().__init__(name, help=_laid_out(help), **more)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own options, and hidden copies of those of `tokenyard` that it lacks."""
        own = super().get_params(ctx)
        known = {text for param in own for text in param.opts}
        more = () if ctx.parent is None else yard_options(_override, hidden=True, exposed=False)
        return [*own, *(param for param in more if not known & {*param.opts})]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options; ``--json`` before the command's name counts as well."""
        rest = super().parse_args(ctx, args)
        choice = ctx.find_object(YardChoice)
        if choice is not None and choice.as_json and not isinstance(self, click.Group):
            if "as_json" not in ctx.params:
                raise click.UsageError(f"{ctx.command_path} has no output in JSON", ctx)
            ctx.params["as_json"] = True
        return rest

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **options: Any,
    ) -> Any:
        """Run it as a program: it ends the process, with one of the statuses of `Exit`."""
        given = list(sys.argv[1:] if args is None else args)
        run: Callable[[], Any] = partial(
            super().main, given, prog_name, complete_var, False, **options
        )
        if not standalone_mode:
            return run()
        try:
            _refuse_bytes(given)
            status = run()
            sys.exit(status if isinstance(status, int) else Exit.OK)
        except (click.Abort, KeyboardInterrupt) as abort:
            sys.exit(_status_of(abort))
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            _check_variables(ctx)
            return super().invoke(ctx)
        except (TokenyardError, redis.RedisError, OSError) as error:
            choice = ctx.find_object(YardChoice)
            is_debugged = ctx.params.get("debug") or (choice is not None and choice.debug)
            if is_debugged and not isinstance(error, StartFailed):  # its story is in the log
                raise
            if isinstance(error, BrokenPipeError):  # nobody reads any more: click ends quietly
                raise
            for line in _lines_of(error):
                click.echo(f"Error: {harmless(line)}", err=True)
            ctx.exit(exit_for(error))


def _lines_of(error: Exception) -> Sequence[str]:
    """An expected error in words: each fault of the settings is a line."""
    if isinstance(error, SettingsError):
        return error.errors
    if isinstance(error, OSError) and not isinstance(error, TokenyardError):
        name = f"{error.filename}: " if error.filename else ""
        return [f"{name}{error.strerror or error}"]
    return [str(error)]


class PlainGroup(click.Group, PlainCommand):
    """A group of commands that are plain ones."""

    command_class = PlainCommand

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Also ``--json``, which it passes on; commands have one of their own, or none."""
        own = super().get_params(ctx)
        if ctx.parent is None:
            return own
        as_json = ["--json", "as_json"]
        return [
            *own,
            click.Option(
                as_json, is_flag=True, hidden=True, expose_value=False, callback=_override
            ),
        ]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by the first word; an unknown one is answered with one that is near."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = nearest(args[0], self.list_commands(ctx))
            hint = f" Did you mean {near!r}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


def _check_variables(ctx: click.Context) -> None:
    """Raises `SettingsError` for variables whose names are misspelt."""
    if isinstance(ctx.command, click.Group) or not isinstance(ctx.command, PlainCommand):
        return
    programs = ctx.command.reads
    if errors := misspelt(os.environ, programs):
        raise SettingsError(errors)
    for warning in unknown(os.environ, programs):
        click.echo(f"Warning: {harmless(warning)}", err=True)


def _refuse_bytes(arguments: Iterable[str]) -> None:
    """Raises `click.UsageError` for what is no text: names, prompts and paths travel as UTF-8."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="backslashreplace").decode()
            raise click.UsageError(f"the argument {shown} is not valid UTF-8") from None


def _status_of(abort: BaseException) -> int:
    """The status of a command that was interrupted, or whose user has answered "no"."""
    signalled = abort if isinstance(abort, KeyboardInterrupt) else abort.__context__
    if isinstance(signalled, KeyboardInterrupt):
        return getattr(signalled, "status", Exit.INTERRUPTED)
    click.echo("Aborted!", err=True)
    return Exit.FAILED


_GIVEN: Final = ParameterSource.COMMANDLINE


def _default_from_group(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """The value that `tokenyard` was given, unless the command was given one itself."""
    choice = ctx.find_object(YardChoice)
    name = str(param.name)
    if choice is None or ctx.get_parameter_source(name) is _GIVEN:
        return value
    return getattr(choice, name)


def _override(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Replace the option of `tokenyard` by the one given after the command's name."""
    choice = ctx.find_object(YardChoice)
    if choice is not None and ctx.get_parameter_source(str(param.name)) is _GIVEN:
        ctx.obj = dataclasses.replace(choice, **{str(param.name): yard_value(ctx, param, value)})
    return value


def yard_value(_: click.Context, param: click.Parameter, value: Any) -> Any:
    """The value of an option of `tokenyard`; raises `click.BadParameter` for a bad name."""
    if param.name == "yard" and not is_name(value):
        raise click.BadParameter(NAME_RULE)
    return value


Callback = Callable[[click.Context, click.Parameter, Any], Any]


def yard_options(
    callback: Callback, *, hidden: bool = False, exposed: bool = True
) -> list[click.Parameter]:
    """The options that say which yard a command is about."""
    shared: dict[str, Any] = {"callback": callback, "hidden": hidden, "expose_value": exposed}
    variables = exposed  # else `tokenyard` itself has read them
    return [
        click.Option(
            ["--redis-url"],
            envvar=URL_VARIABLE if variables else None,
            show_envvar=True,
            help=REDIS_URL_HELP,
            **shared,
        ),
        click.Option(
            ["--yard"],
            envvar=YARD_VARIABLE if variables else None,
            show_envvar=True,
            default=YARD_DEFAULT,
            show_default=True,
            help="Name of the yard: one broker can hold several.",
            **shared,
        ),
        click.Option(
            ["--debug"], is_flag=True, help="Log everything, and show tracebacks.", **shared
        ),
    ]


SettingsT = TypeVar("SettingsT", bound=ProgramSettings)
#: The help of the settings that all programs have, but for the traces.
SERVICE_TEXTS: Final = {
    "metrics_port": "Port of the Prometheus metrics; 0: none (docs/metrics.md).",
    "metrics_host": "Address of the metrics; 0.0.0.0: all of this host.",
    "liveness_timeout_s": "/livez beside the metrics fails after so long without progress.",
    "otlp_endpoint": "Send traces to this URL, as OTLP over HTTP; default: OTEL_* variables.",
}
#: The help of settings that the programs share that serve HTTP.
HTTP_TEXTS: Final = {
    "name": "Name of this process.  [default: host and pid]",
    "host": "Address to listen on.",
    "port": "Port to listen on; 0 is any free one.",
    "keys": "Whether requests need a key (`tokenyard keys`); auto: on any address but loopback.",
    "max_connections": "Most connections; more are answered with 503.",
    "receive_s": "Longest time to receive a request, and a second more for each 16 KiB.",
    "send_s": "A client that reads nothing of its answer for so long is cut off.",
    "idle_s": "A connection without a request is closed after so long.",
    "tls_cert": "PEM file of the certificate; without one TLS is the proxy's.",
    "tls_key": "PEM file of its key.",
}


def program(
    name: str,
    settings_type: type[SettingsT],
    run: Callable[[SettingsT], int],
    *,
    texts: Mapping[str, str],
    arguments: Sequence[click.Argument] = (),
) -> click.Command:
    """The command line of one long-lived program.

    Each field of ``settings_type`` is an option, explained in ``texts`` or `SERVICE_TEXTS`, and a
    variable ``TOKENYARD_<PROGRAM>_<FIELD>``; ``arguments`` are fields, too. ``run`` gets the
    settings and returns the exit status; its docstring is the help text.
    """

    def start(redis_url: str | None, yard: str, debug: bool, **given: Any) -> None:
        redis_url = broker_url(redis_url, yard)
        if not redis_url:
            raise click.UsageError("give --redis-url or set TOKENYARD_REDIS_URL")
        values = {field: value for field, value in given.items() if value is not None}
        settings = settings_type(redis_url=redis_url, yard=yard, **values)
        start_logging(redis_url, debug=debug)
        setproctitle(f"tokenyard {name} {yard}")
        collect_seldom()
        end_with_threads()
        sys.exit(run(settings))

    command = PlainCommand(
        name,
        callback=start,
        params=[
            *yard_options(_default_from_group),
            *settings_options(settings_type, {**texts, **SERVICE_TEXTS}, _prefix(name)),
            *arguments,
        ],
        help=run.__doc__,
        epilog=f"Each option can also be set by a variable: {_prefix(name)}_<OPTION>.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    command.reads = (name,)
    return command


def _prefix(name: str) -> str:
    return f"TOKENYARD_{name.upper()}"


# Environment variables with misspelt names.

_PREFIX: Final = "TOKENYARD_"
#: Settings of each program that reads them from variables.
_PROGRAMS: Final[Mapping[str, type[ProgramSettings]]] = {
    "coordinator": CoordinatorSettings,
    "worker": WorkerSettings,
    "gateway": GatewaySettings,
    "board": BoardSettings,
    "bridge": BridgeSettings,
}
#: Variables of all programs.
_COMMON: Final = (URL_VARIABLE, *CREDENTIALS, YARD_VARIABLE, "TOKENYARD_OPERATOR")
#: Least similarity of a name that has only our prefix in common.
_MIN_SIMILARITY: Final = 0.75
#: Variables that Tokenyard itself sets, for call-backs, worker processes and tests; and
#: `tokenyard.broker.url.BATCH_URL_VARIABLE`.
_OURS: Final = re.compile(r"TOKENYARD_(BATCH_\w+|OMP_NUM_THREADS|TEST_\w+)")
#: Variables that Kubernetes sets for a Service whose name begins with "tokenyard".
_OF_SERVICES: Final = re.compile(
    r"TOKENYARD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)\w*)?)"
)


def variables_of(program: str) -> list[str]:
    """The variables of one program."""
    fields = (field.name for field in dataclasses.fields(_PROGRAMS[program]))
    names = (name for name in fields if name not in {"redis_url", "yard"})
    return [f"{_prefix(program)}_{name.upper()}" for name in names]


def misspelt(environment: Mapping[str, str], programs: Collection[str]) -> list[str]:
    """A message for each variable that is similar to one of ``programs``, or to a common one.

    Variables of other programs and of Kubernetes are ignored, and so are names without a similar
    one.
    """
    return [
        f"nothing reads the variable {name}; did you mean {near}?"
        for name in _unread(environment)
        if (near := _similar(name, programs))
    ]


def unknown(environment: Mapping[str, str], programs: Collection[str]) -> list[str]:
    """A message for each variable with the prefix of ``programs`` that is not similar to any."""
    prefixes = tuple(f"{_prefix(program)}_" for program in programs)
    return [
        f"nothing reads the variable {name}"
        for name in _unread(environment)
        if name.startswith(prefixes) and not _similar(name, programs)
    ]


def _similar(name: str, programs: Collection[str]) -> str:
    """The similar variable; prefixes do not count."""
    for program in programs:
        prefix = f"{_prefix(program)}_"
        if name.startswith(prefix):
            return _nearest_after(prefix, name, variables_of(program), 0.6)
    known = [*_COMMON, *(one for program in programs for one in variables_of(program))]
    return _nearest_after(_PREFIX, name, known, _MIN_SIMILARITY)


def _nearest_after(prefix: str, name: str, known: Iterable[str], likeness: float) -> str:
    rests = (one.removeprefix(prefix) for one in known)
    near = nearest(name.removeprefix(prefix), rests, likeness)
    return prefix + near if near else ""


def _unread(environment: Mapping[str, str]) -> Iterator[str]:
    """Variables with our prefix that no program reads."""
    known = {*_COMMON, *(name for program in _PROGRAMS for name in variables_of(program))}
    for name in sorted(environment):
        is_known = name in known or _OURS.fullmatch(name) or _OF_SERVICES.fullmatch(name)
        if name.startswith(_PREFIX) and not is_known:
            yield name
