"""`tokenyard up`: a whole yard on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final, get_args

import click
import msgspec
from rich.console import Console

from tokenyard.cli.child import LogLine
from tokenyard.cli.interrupts import Interrupts
from tokenyard.cli.local_yard import LocalPlan, LocalYard
from tokenyard.cli.places import default_data_dir, example_model
from tokenyard.cli.progress import spinner
from tokenyard.connection import public_url
from tokenyard.keys import Keys
from tokenyard.program import PlainCommand, YardChoice
from tokenyard.settings import EngineName, WorkerSettings

_DEFAULTS: Final = {field.name: field.default for field in dataclasses.fields(WorkerSettings)}
ABOUT: Final = """Run a whole yard on this machine: broker, coordinator and workers.

Without --redis-url it starts an embedded broker (Valkey) on a free loopback port, which keeps its
data in --data-dir, so that what was accepted survives a restart. From a checkout it serves the
example model `adder`. It stops everything on Ctrl-C or SIGTERM: running requests may finish
first, a second Ctrl-C stops at once. It also ends when all of its workers have been ended by
`tokenyard drain` or `stop`.

\b
Examples:
  tokenyard up
  tokenyard up --model ./my-model --slots 1
  tokenyard up --models models.toml --slots 2 --spares 1     several models, loaded on demand
  tokenyard --redis-url redis://localhost:6379 up
  tokenyard up --engine simulated     answers are made up; needs no model and no vLLM

Then, in another terminal: tokenyard submit "12+34="

What has no option here is set by variables, TOKENYARD_WORKER_<OPTION> and
TOKENYARD_COORDINATOR_<OPTION>: see `tokenyard worker --help`, `tokenyard coordinator --help`.
"""


@click.command(cls=PlainCommand, help=ABOUT, short_help="Run a whole yard on this machine.")
@click.option(
    "--slots",
    "--workers",
    "workers",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Devices (on a CPU: shares of its cores), each with one worker that is awake.",
)
@click.option(
    "--spares",
    type=click.IntRange(0, 64),
    default=0,
    show_default=True,
    help="Warm processes beside those, to stand in for one that dies.",
)
@click.option(
    "--sleepers",
    type=click.IntRange(0, 64),
    default=0,
    show_default=True,
    help="Engines that may sleep on each device beside the one that is awake.",
)
@click.option(
    "--engine",
    type=click.Choice(get_args(EngineName)),
    default="vllm",
    show_default=True,
    help="What generates tokens; `simulated` makes them up.",
)
@click.option(
    "--model",
    help="Model folder or Hugging Face name.  [default: the adder of a checkout]",
)
@click.option(
    "--models",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File that lists the models that may be loaded (docs/models.md).",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the embedded broker keeps its data, and all parts their logs."
    "  [default: ~/.local/share/tokenyard/yard-<yard>]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port of the embedded broker; 0 is a free one.",
)
@click.option(
    "--grace-s",
    type=click.FloatRange(0),
    default=_DEFAULTS["grace_s"],
    show_default=True,
    help="When stopped, running requests may finish for so long.",
)
@click.option(
    "--start-timeout-s",
    type=click.FloatRange(1),
    default=_DEFAULTS["start_timeout_s"],
    show_default=True,
    help="Longest wait for the workers' engines.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="When ready, print one JSON object: url, pids."
)
@click.pass_obj
def up(
    choice: YardChoice,
    workers: int,
    spares: int,
    sleepers: int,
    engine: EngineName,
    model: str | None,
    models: Path | None,
    data_dir: Path | None,
    port: int,
    grace_s: float,
    start_timeout_s: float,
    as_json: bool,
) -> None:
    """Start, wait until it answers, watch, stop."""
    if model and models:
        raise click.UsageError("give either --model or --models")
    example = engine == "vllm" and not model and not models
    if engine == "vllm" and not models:
        model = _existing(model or str(example_model("adder")))
    plan = LocalPlan(
        yard=choice.yard,
        redis_url=choice.redis_url,
        data_dir=data_dir or default_data_dir(choice.yard),
        port=port,
        workers=workers,
        engine=engine,
        model=model or "",
        models=models.resolve() if models else None,
        spares=spares,
        sleepers=sleepers,
        grace_s=grace_s,
        start_timeout_s=start_timeout_s,
        enforce_eager=example,
        debug=choice.debug,
    )
    # With --json, standard output belongs to the program that reads it.
    console = Console(stderr=as_json, highlight=False, markup=False, soft_wrap=True)
    Foreground(plan, console, as_json=as_json).run()


def _existing(model: str) -> str:
    """The model as the workers, which may be started elsewhere, will find it."""
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if model.startswith((".", "/", "~")):
        raise click.UsageError(f"there is no model folder {model}")
    return model


class Foreground:
    """One run of `tokenyard up` in a terminal."""

    def __init__(self, plan: LocalPlan, console: Console, *, as_json: bool) -> None:
        self._plan = plan
        self._console = console
        self._as_json = as_json
        self._yard = LocalYard(plan, self._log)

    def run(self) -> None:
        """Until interrupted, or drained; raises `YardFailed` when a part ends for good."""
        with Interrupts() as interrupts:
            try:
                self._start()
                self._announce()
                self._yard.run()
            except KeyboardInterrupt:
                self._console.print(
                    f"Stopping: running requests may finish for {self._plan.grace_s:g} s;"
                    " Ctrl-C again stops at once."
                )
            finally:
                interrupts.hold()
                self._yard.stop(lambda: interrupts.is_hurried)
            self._console.print("Stopped.")

    def _start(self) -> None:
        plan = self._plan
        what = str(plan.models or plan.model or "no model")
        self._console.print(f"Starting {plan.workers} workers, engine {plan.engine}, {what}.")
        if plan.engine == "simulated":
            self._console.print("Engine simulated: its answers are made up.")
        with spinner(self._console, plan.processes) as tell:
            for warning in self._yard.start():
                self._console.print(f"Warning: {warning}", style="yellow")
            self._yard.wait_ready(tell)

    def _log(self, name: str, line: LogLine) -> None:
        style = "yellow" if line.is_serious else "dim"
        self._console.print(f"{name}: {line.text}", style=style)

    def _announce(self) -> None:
        url = self._yard.url
        if self._as_json:
            ready = {"url": url, "yard": self._plan.yard, "pids": self._yard.pids}
            click.echo(msgspec.json.encode(ready | {"data_dir": str(self._plan.data_dir)}))
        else:
            self._console.print(how_to_try(self._plan, url))


def how_to_try(plan: LocalPlan, url: str) -> str:
    """What a newcomer needs to know of a yard that is up."""
    keys = Keys(plan.yard)
    options = "" if plan.yard == "main" else f" --yard {plan.yard}"
    if plan.redis_url or plan.data_dir != default_data_dir(plan.yard):
        options += f" --redis-url {public_url(url)}"
    redis_cli = f"redis-cli -u {public_url(url)}"
    params = """'{"max_tokens":8,"temperature":0}'"""
    question = 'submit "12+34="' if plan.models is None else 'submit --model NAME "12+34="'
    model = "" if plan.models is None else " model NAME"
    return f"""
The yard {plan.yard!r} is up at {public_url(url)}
Logs are in {plan.data_dir / "logs"}

Try it in another terminal:

  tokenyard{options} {question}

or with nothing but redis-cli:

  {redis_cli} XADD '{keys.intake("normal")}' '*' id q1{model} prompt '12+34=' params {params}
  {redis_cli} XREAD BLOCK 5000 STREAMS '{keys.reply("anon", "q1")}' 0

Ctrl-C stops everything.
"""
