"""The command `tokenyard`: one file for each subcommand, imported when it is asked for."""

from __future__ import annotations

from typing import Final

import click

from tokenyard import __version__
from tokenyard.cli.shared.lazy import LazyGroup
from tokenyard.process.program import YardChoice, yard_options, yard_value

#: Where each subcommand lies. `coordinator` and `worker` are programs of their own as well.
COMMANDS: Final = {
    "demo": "tokenyard.cli.demo:demo",
    "up": "tokenyard.cli.up:up",
    "submit": "tokenyard.cli.submit:submit",
    "requests": "tokenyard.cli.requests:requests",
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
    "scripts": "tokenyard.cli.scripts:scripts",
    "info": "tokenyard.cli.info:info",
    "top": "tokenyard.cli.top:top",
    "doctor": "tokenyard.cli.doctor:doctor",
    "bench": "tokenyard.cli.bench:bench",
    "completion": "tokenyard.cli.completion:completion",
    "coordinator": "coordinator.__main__:main",
    "worker": "worker.__main__:main",
}
ABOUT: Final = """Tokenyard is a durable job queue for LLM inference on Redis Streams.

\b
Begin here:
  tokenyard demo              200 sums to two vLLM workers on this CPU, checked
  tokenyard up                a broker, a coordinator and two workers to play with
  tokenyard submit "12+34="   ask them something (in another terminal)
  tokenyard info              see what they do
  tokenyard requests          list the requests that wait, run, or are over
  tokenyard explain ID        see what a request has been through

Without --redis-url, `up` starts a broker of its own, and the other commands find it. The options
below may also stand behind the command, where they win. `tokenyard COMMAND --help` explains each
command and has examples.
"""
EPILOG: Final = """Exit statuses: 0 success, 1 a request or the command failed, 2 wrong usage,
3 no usable broker or coordinator, or workers that have not obeyed, 4 time is over, 5 the workers
cannot start, 130 interrupted by Ctrl-C (of another signal 128 and its number)."""


@click.group(
    cls=LazyGroup,
    places=COMMANDS,
    help=ABOUT,
    epilog=EPILOG,
    params=yard_options(yard_value),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, where the command has it to print."
)
@click.version_option(__version__, "-V", "--version", prog_name="tokenyard")
@click.pass_context
def main(ctx: click.Context, redis_url: str | None, yard: str, debug: bool, as_json: bool) -> None:
    """Entry point of the program."""
    ctx.obj = YardChoice(redis_url or "", yard, debug, as_json)
