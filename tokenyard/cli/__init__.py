"""The command `tokenyard`: one file for each subcommand, imported when it is asked for."""

from __future__ import annotations

from typing import Final

import click

from tokenyard import __version__
from tokenyard.broker import running_url
from tokenyard.cli.lazy import LazyGroup
from tokenyard.cli.places import default_data_dir
from tokenyard.keys import is_name
from tokenyard.program import REDIS_URL_HELP, YARD_DEFAULT, YardChoice

#: Where each subcommand lies. `coordinator` and `worker` are programs of their own as well.
COMMANDS: Final = {
    "demo": "tokenyard.cli.demo:demo",
    "up": "tokenyard.cli.up:up",
    "submit": "tokenyard.cli.submit:submit",
    "result": "tokenyard.cli.result:result",
    "cancel": "tokenyard.cli.cancel:cancel",
    "explain": "tokenyard.cli.explain:explain",
    "batch": "tokenyard.cli.batch:batch",
    "dead": "tokenyard.cli.dead:dead",
    "requeue": "tokenyard.cli.requeue:requeue",
    "empty": "tokenyard.cli.empty:empty",
    "models": "tokenyard.cli.models:models",
    "pause": "tokenyard.cli.pause:pause",
    "unpause": "tokenyard.cli.pause:unpause",
    "suspend": "tokenyard.cli.pause:suspend",
    "resume": "tokenyard.cli.pause:resume",
    "epoch": "tokenyard.cli.epoch:epoch",
    "profile": "tokenyard.cli.profile:profile",
    "drain": "tokenyard.cli.drain:drain",
    "stop": "tokenyard.cli.drain:stop",
    "info": "tokenyard.cli.info:info",
    "top": "tokenyard.cli.top:top",
    "doctor": "tokenyard.cli.doctor:doctor",
    "bench": "tokenyard.cli.bench:bench",
    "completion": "tokenyard.cli.completion:completion",
    "coordinator": "coordinator.__main__:main",
    "worker": "worker.__main__:main",
}
#: These start a broker of their own where no URL is given; the others look for a running one.
_OWN_BROKER: Final = {"up", "demo"}
ABOUT: Final = """Tokenyard is a durable job queue for LLM inference on Redis Streams.

\b
Begin here:
  tokenyard demo              200 sums to two vLLM workers on this CPU, checked
  tokenyard up                a broker, a coordinator and two workers to play with
  tokenyard submit "12+34="   ask them something (in another terminal)
  tokenyard info              see what they do
  tokenyard explain ID        see what a request has been through

Without --redis-url, `up` starts a broker of its own, and the other commands find it. `tokenyard
COMMAND --help` explains each command and has examples.
"""
EPILOG: Final = """Exit statuses: 0 success, 1 a request or the command failed, 2 wrong usage,
3 no usable broker or coordinator, or workers that have not obeyed, 4 time is over."""


def _yard_name(_: click.Context, __: click.Parameter, value: str) -> str:
    if not is_name(value):
        raise click.BadParameter("use 1 to 100 of A-Z a-z 0-9 _ . : @ -")
    return value


@click.group(
    cls=LazyGroup,
    places=COMMANDS,
    help=ABOUT,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--redis-url",
    envvar="TOKENYARD_REDIS_URL",
    show_envvar=True,
    help=REDIS_URL_HELP,
)
@click.option(
    "--yard",
    envvar="TOKENYARD_YARD",
    show_envvar=True,
    default=YARD_DEFAULT,
    show_default=True,
    callback=_yard_name,
    help="Name of the yard: one broker can hold several.",
)
@click.option("--debug", is_flag=True, help="Log everything, and show tracebacks.")
@click.version_option(__version__, "-V", "--version", prog_name="tokenyard")
@click.pass_context
def main(ctx: click.Context, redis_url: str | None, yard: str, debug: bool) -> None:
    """Entry point of the program."""
    url = redis_url or ""
    if not url and ctx.invoked_subcommand not in _OWN_BROKER:
        url = running_url(default_data_dir(yard)) or ""
    ctx.obj = YardChoice(url, yard, debug)
