"""`tokenyard up`: a whole yard on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from tokenyard.broker.url import public_url
from tokenyard.cli.shared.console import HarmlessConsole, say
from tokenyard.cli.up import engine_options
from tokenyard.cli.up.child import LogLine
from tokenyard.cli.up.local_yard import LocalPlan, LocalYard
from tokenyard.cli.up.progress import Announcer, choose_http_port, spinner
from tokenyard.process.extras import why_no_board, why_no_gateway
from tokenyard.process.home import expanded
from tokenyard.process.interrupted import Interrupts
from tokenyard.process.program import PlainCommand, YardChoice
from tokenyard.process.running import default_data_dir
from tokenyard.process.servers import EMBEDDED
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import EngineName
from tokenyard.protocol.texts import counted

#: The settings of workers that have options here.
_WORKER_TEXTS: Final = {
    "spares": "Warm processes that replace one that dies.",
    "sleepers": "Sleeping engines per device beside the awake one.",
    "engine": "Engine that generates tokens; `simulated` invents them.",
    **engine_options.DEVICE_TEXTS,
    "model": "Model folder or Hugging Face name.  [default: the example `adder`]",
    "models": "File that lists the models that may be loaded (docs/models.md).",
    "name": "Prefix of the workers' names.  [default: host and pid]",
    "grace_s": "Time for running requests to finish on a stop.",
    "start_timeout_s": "Longest wait for the workers' engines.",
}


@click.command(
    cls=PlainCommand,
    short_help="Run a whole yard on this machine.",
    params=engine_options.worker_options(
        "Devices (on a CPU: shares of its cores), each with one awake worker.",
        _WORKER_TEXTS,
        "TOKENYARD_WORKER_SLOTS",
    ),
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the embedded broker's data and all logs."
    "  [default: ~/.local/share/tokenyard/yard-<yard>]",
)
@click.option(
    "--server",
    metavar="auto|embedded|PROGRAM",
    default=EMBEDDED,
    show_default=True,
    help="The broker: the embedded Valkey; the valkey-server or redis-server (7.0 or newer)"
    " of this machine if there is one; or the path of a program.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of the broker; 0 is any free one.  [default: the previous one; at first 6379"
    " if it is free]",
)
@click.option(
    "--http-port",
    envvar="TOKENYARD_GATEWAY_PORT",
    type=click.IntRange(0, 65535),
    help="Port of the gateway, which speaks OpenAI's HTTP API, and of the board; 0 is any free one."
    "  [default: 8000, or any if it is taken]",
)
@click.option(
    "--gateway/--no-gateway",
    default=None,
    help="Whether to run a gateway, and a worker for its batches."
    "  [default: with engine vllm, if it is new enough]",
)
@click.option(
    "--board/--no-board",
    default=True,
    show_default=True,
    envvar="TOKENYARD_GATEWAY_BOARD",
    help="Whether to serve the board: the yard in a browser.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="When ready, print one JSON object: url, pids."
)
@click.pass_obj
def up(
    choice: YardChoice,
    /,
    engine: EngineName,
    model: str | None,
    models: Path | None,
    data_dir: Path | None,
    server: str,
    port: int | None,
    http_port: int | None,
    gateway: bool | None,
    board: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Run a whole yard on this machine: broker, coordinator, workers and gateway.

    Without --redis-url it starts its own broker (the embedded Valkey, or --server) on a loopback
    port, which keeps its data in --data-dir, so that accepted requests survive a restart. The port
    is 6379 if it is free, and stays the same for this folder. While it runs, the other commands and
    `Client()` find the yard without a URL. Without --model it serves the example model `adder`.
    Ctrl-C or SIGTERM stops everything: running requests finish first, a second Ctrl-C stops
    immediately. It also ends when all of its workers have been ended by `tokenyard drain` or
    `stop`.

    Examples:
      tokenyard up
      tokenyard up --model ./my-model --slots 1
      tokenyard up --models models.toml --slots 2     several models on demand
      tokenyard up --server auto          with this machine's valkey-server or redis-server
      tokenyard --redis-url redis://localhost:6379 up
      tokenyard up --engine simulated     invented answers, without a model and vLLM; no gateway

    It prints the URL of the board, which shows the yard in a browser.

    Then, in another terminal: tokenyard submit "12+34="

    Variables set all other options: TOKENYARD_WORKER_<OPTION> and TOKENYARD_COORDINATOR_<OPTION>,
    see `tokenyard worker --help`, `tokenyard coordinator --help`.
    """
    model, models = _given_first(model, models)
    if model and models:
        raise click.UsageError("give either --model or --models")
    if models:
        _check(models)
    example = engine == "vllm" and not model and not models
    if engine == "vllm" and not models:
        model = _existing(model or str(engine_options.example_model("adder")))
    models = models.resolve() if models else None
    worker, used = engine_options.worker_settings(
        engine=engine, model=model, models=models, **given
    )
    if gateway and engine != "vllm":
        raise click.UsageError("--gateway needs --engine vllm: it uses the model's tokenizer")
    wants_gateway = gateway is not False and engine == "vllm"
    why_none = why_no_gateway() if wants_gateway else ""
    if gateway and why_none:
        raise click.UsageError(f"--gateway: {why_none}")
    has_gateway = wants_gateway and not why_none
    why_no = why_no_board() if board else ""
    has_board = board and not why_no
    plan = LocalPlan(
        yard=choice.yard,
        redis_url=choice.redis_url,
        data_dir=data_dir or default_data_dir(choice.yard),
        worker=worker,
        port=port,
        server=server,
        enforce_eager=example,
        http_port=choose_http_port(http_port) if has_gateway or has_board else 0,
        has_gateway=has_gateway,
        has_board=has_board,
        debug=choice.debug,
    )
    # With --json, standard output is only JSON.
    console = HarmlessConsole(stderr=as_json, highlight=False, markup=False, soft_wrap=True)
    if why_none:
        console.print(f"No gateway: {why_none}.")
    if why_no:
        console.print(f"No board: {why_no}.")
    Foreground(plan, console, used, as_json=as_json).run()


def _given_first(model: str | None, models: Path | None) -> tuple[str | None, Path | None]:
    """The one that is an option if the other is a variable."""
    source = click.get_current_context().get_parameter_source
    if source("model") is not source("models"):
        if source("model") is ParameterSource.COMMANDLINE:
            return model, None
        if source("models") is ParameterSource.COMMANDLINE:
            return None, models
    return model, models


up.reads = ("coordinator", "worker", "gateway", "board")


def _existing(model: str) -> str:
    """The model with an absolute path, for workers with another working directory."""
    path = expanded(model)
    if path.is_dir():
        return str(path.resolve())
    if model.startswith((".", "/", "~")):
        raise click.UsageError(f"there is no model folder {model}")
    return model


def _check(models: Path) -> None:
    """Raises `SettingsError` for a faulty models file, before anything is started."""
    from worker.models import read_models

    read_models(models)


class Foreground:
    """One run of `tokenyard up` in a terminal."""

    def __init__(self, plan: LocalPlan, console: Console, used: str, *, as_json: bool) -> None:
        """``used`` names the devices of its engines; "" for none."""
        self._plan = plan
        self._used = used
        self._console = console
        self._as_json = as_json
        self._yard = LocalYard(plan, self._log)
        self._announcer = Announcer(plan.data_dir, plan.yard)
        self._is_up = False
        self._is_found = False  # by commands without a URL

    def run(self) -> None:
        """Run until interrupted or drained; raises `YardFailed` if a part ends for good."""
        with Interrupts() as interrupts:
            try:
                self._start()
                self._is_up = True
                self._announce()
                self._yard.run()
            except KeyboardInterrupt:
                grace = (
                    f": running requests may finish for {self._plan.worker.grace_s:g} s;"
                    " Ctrl-C again stops immediately."
                )
                self._console.print("Stopping" + (grace if self._is_up else "."))
            finally:
                interrupts.hold()
                # Before it is up, nothing has to finish.
                self._yard.stop(lambda: interrupts.is_hurried or not self._is_up)
                self._announcer.withdraw()
            self._console.print("Stopped.")

    def _start(self) -> None:
        worker = self._plan.worker
        self._announcer.claim()
        what = str(worker.models or worker.model or "no model")
        where = f" on {self._used}" if self._used else ""
        self._console.print(
            f"Starting {counted(worker.slots, 'worker')}{where}, engine {worker.engine}, {what}."
        )
        if worker.engine == "simulated":
            self._console.print("Engine simulated: its answers are invented.")
        with spinner(self._console, self._plan.processes) as tell:
            for warning in self._yard.start():
                self._warn(warning)
            self._introduce_broker()
            self._yard.wait_ready(tell)

    def _introduce_broker(self) -> None:
        """Print and publish the broker's URL."""
        yard = self._yard
        if yard.server:
            self._console.print(f"The broker is {yard.server} at {public_url(yard.url)}.")
        if yard.lost_port:
            self._warn(f"the previous port {yard.lost_port} is taken: URLs have changed")
        unfound = self._announcer.publish(yard.url)
        self._is_found = not unfound
        if unfound:
            self._warn(unfound)

    def _warn(self, warning: str) -> None:
        self._console.print(f"Warning: {warning}", style="yellow")

    def _log(self, name: str, line: LogLine) -> None:
        style = "yellow" if line.is_serious else "dim"
        self._console.print(f"{name}: {line.text}", style=style)

    def _announce(self) -> None:
        plan, yard = self._plan, self._yard
        if not self._as_json:
            urls = (yard.url, yard.http_url, yard.board_url)
            self._console.print(how_to_try(plan, *urls, is_found=self._is_found))
            return
        ready = {
            "url": yard.url,
            "yard": plan.yard,
            "pids": yard.pids,
            "server": yard.server,
            "http_url": yard.http_url,
            "board_url": yard.board_url,
            "data_dir": str(plan.data_dir),
        }
        say(msgspec.json.encode(ready))


def how_to_try(
    plan: LocalPlan, url: str, http_url: str | None, board_url: str | None, *, is_found: bool
) -> str:
    """Instructions for a yard that is up."""
    keys = Keys(plan.yard)
    options = "" if plan.yard == "main" else f" --yard {plan.yard}"
    if not is_found:
        options += f" --redis-url {public_url(url)}"
    redis_cli = f"redis-cli -u {public_url(url)}"
    params = """'{"max_tokens":8,"temperature":0}'"""
    models = plan.worker.models
    question = 'submit "12+34="' if models is None else 'submit --model NAME "12+34="'
    model = "" if models is None else " model NAME"
    by_http = served = ""
    if http_url is not None:
        served = f"OpenAI's API is at {http_url}\n"
        name = "NAME" if models else Path(plan.worker.model).name
        body = f"""'{{"model":"{name}","prompt":"12+34=","max_tokens":8,"temperature":0}}'"""
        by_http = f"""or by HTTP:

  curl {http_url}/completions -H 'Content-Type: application/json' -d {body}

"""
    if board_url is not None:
        served += f"The board is at {board_url}\n"
    return f"""
The yard {plan.yard!r} is up at {public_url(url)}
{served}Logs are in {plan.data_dir / "logs"}

Try it in another terminal:

  tokenyard{options} {question}

{by_http}or with nothing but redis-cli:

  {redis_cli} XADD '{keys.intake("normal")}' '*' id q1{model} prompt '12+34=' params {params}
  {redis_cli} XREAD BLOCK 5000 STREAMS '{keys.reply("anon", "q1")}' 0

Ctrl-C stops everything.
"""
