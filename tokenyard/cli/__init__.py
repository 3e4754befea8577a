"""The command `tokenyard`: one file or folder per subcommand, imported when needed.

The packages `coordinator` and `worker` have common names: a module of the same name elsewhere on
the path is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

import tokenyard
from tokenyard import __version__
from tokenyard.process.program import PlainCommand, PlainGroup, YardChoice, yard_options, yard_value
from tokenyard.protocol.errors import SettingsError

_ROOT: Final = Path(tokenyard.__file__).resolve().parents[1]

#: The place of each subcommand. `coordinator` and `worker` are also programs of their own.
COMMANDS: Final = {
    "demo": "tokenyard.cli.demo:demo",
    "up": "tokenyard.cli.up:up",
    "submit": "tokenyard.cli.submit:submit",
    "requests": "tokenyard.cli.requests:requests",
    "result": "tokenyard.cli.requests:result",
    "cancel": "tokenyard.cli.operations:cancel",
    "explain": "tokenyard.cli.requests:explain",
    "batch": "tokenyard.cli.batch:batch",
    "dead": "tokenyard.cli.dead:dead",
    "requeue": "tokenyard.cli.operations:requeue",
    "empty": "tokenyard.cli.operations:empty",
    "models": "tokenyard.cli.models:models",
    "pause": "tokenyard.cli.operations:pause",
    "unpause": "tokenyard.cli.operations:unpause",
    "suspend": "tokenyard.cli.operations:suspend",
    "resume": "tokenyard.cli.operations:resume",
    "epoch": "tokenyard.cli.operations:epoch",
    "drain": "tokenyard.cli.operations:drain",
    "stop": "tokenyard.cli.operations:stop",
    "keys": "tokenyard.cli.keys:keys",
    "tenants": "tokenyard.cli.tenants:tenants",
    "info": "tokenyard.cli.info:info",
    "top": "tokenyard.cli.top:top",
    "doctor": "tokenyard.cli.doctor:doctor",
    "audit": "tokenyard.cli.audit:audit",
    "completion": "tokenyard.cli.completion:completion",
    "coordinator": "coordinator.__main__:main",
    "worker": "worker.__main__:main",
    "gateway": "gateway.__main__:main",
    "bridge": "gateway.bridge.__main__:main",
    "board": "tokenyard.board.__main__:main",
}
EPILOG: Final = """Exit statuses: 0 success, 1 a request or the command failed, 2 wrong usage,
3 no usable broker or coordinator, a full queue, or workers that have not obeyed, 4 timeout, 5 the
workers cannot start, 130 interrupted by Ctrl-C (128 plus the number of another signal)."""


class LazyGroup(PlainGroup):
    """Imports each command when it is needed, so that all start quickly."""

    def __init__(self, *args: Any, places: Mapping[str, str], **options: Any) -> None:
        """``places`` maps each command, in order, to its ``module:attribute``."""
        super().__init__(*args, **options)
        self._places = places

    def list_commands(self, _: click.Context) -> list[str]:
        """Names, in the order of ``places``."""
        return list(self._places)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; one that refuses if its package is not ours."""
        if cmd_name not in self._places:
            return None
        module, _colon, attribute = self._places[cmd_name].partition(":")
        package = module.partition(".")[0]
        if found := _foreign_module(package):
            return _refusal(cmd_name, package, found)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def _foreign_module(package: str) -> str:
    """Where a package is found instead of ours; "" if it is ours. Imports nothing."""
    spec = importlib.util.find_spec(package)
    found = spec.origin or next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    is_ours = found and Path(found).resolve().parent == _ROOT / package
    return "" if is_ours else found or "nowhere"


def _refusal(name: str, package: str, found: str) -> click.Command:
    """A command that reports that its package is not ours."""

    def refuse(**_: object) -> None:
        ours = f"not Tokenyard's ({_ROOT / package})"
        todo = "rename it, or take its folder off PYTHONPATH"
        raise SettingsError([f"the module {package!r} is at {found}, which is {ours}: {todo}"])

    return PlainCommand(
        name,
        callback=refuse,
        params=[click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
        short_help=f"Not available: {found} is in its place.",
    )


@click.group(
    cls=LazyGroup,
    places=COMMANDS,
    epilog=EPILOG,
    params=yard_options(yard_value),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, if the command supports it.")
@click.version_option(__version__, "-V", "--version", prog_name="tokenyard")
@click.pass_context
def main(ctx: click.Context, redis_url: str | None, yard: str, debug: bool, as_json: bool) -> None:
    """Tokenyard is a durable job queue for LLM inference on Redis Streams.

    Begin here:
      tokenyard demo              200 sums to two vLLM workers on this CPU, checked
      tokenyard up                a broker, a coordinator and two workers to try
      tokenyard submit "12+34="   send a prompt (in another terminal)
      tokenyard info              show the state of the yard
      tokenyard requests          list requests that wait, run or have ended
      tokenyard explain ID        show the timeline of a request

    Without --redis-url, `up` starts its own broker, and the other commands find it. The options
    below may also follow the command, where they take precedence. `tokenyard COMMAND --help`
    explains each command with examples.
    """
    ctx.obj = YardChoice(redis_url or "", yard, debug, as_json)
