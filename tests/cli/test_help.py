"""Help, usage errors, and how options become settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tests.cli.running import Ask
from tokenyard.cli import COMMANDS
from tokenyard.cli.up.engine_options import example_model
from tokenyard.process import program
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.errors import NoCoordinator, WaitTimeout
from tokenyard.protocol.settings import CoordinatorSettings, WorkerSettings


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_examples(invoke: Ask, command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == Exit.OK, result.output
    assert "Examples:" in result.output
    assert "tokenyard" in result.output


def test_the_bare_command_prints_where_to_begin(invoke: Ask) -> None:
    result = invoke("--help")
    assert result.exit_code == Exit.OK
    assert "Begin here:" in result.output
    for command in COMMANDS:
        assert f"  {command} " in result.output
    assert "..." not in result.output.partition("Commands:")[2], "a line is cut"


def test_version_option(invoke: Ask) -> None:
    assert invoke("-V").output.startswith("tokenyard, version ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["submit"], "give a prompt:"),
        (["submit", "a", ""], "give a prompt, not an empty one:"),
        (["submit", "--id", "", "a"], "--id and --client must not be empty"),
        (["submit", "--client", "", "a"], "--id and --client must not be empty"),
        (["submit", "--ids", ""], "give token ids"),
        (["submit", "--id", "q1", "a", "b"], "--id is for one prompt"),
        (["submit", "--param", "seed", "a"], "give name=value"),
        (["submit", "--ids", "1,two"], "give token ids"),
        (["--yard", "a yard", "info"], "A-Z a-z 0-9"),
        (["info", "--yard", "a yard"], "A-Z a-z 0-9"),
        (["--redis-url", "http://127.0.0.1", "info"], "redis://"),
        (["completion", "tcsh"], "'tcsh' is not one of"),
        (["up", "--model", "./nowhere"], "no model folder ./nowhere"),
        (["up", "--workers", "0"], "--workers"),
        (["coordinator"], "--redis-url"),
        (["worker"], "--redis-url"),
    ],
)
def test_wrong_usage_is_explained(invoke: Ask, arguments: list[str], reason: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == Exit.USAGE
    assert reason in result.output
    assert "Traceback" not in result.output


ALL_OR_ONE = "give one of --all, --model and --worker"


@pytest.mark.parametrize(
    ("status", "arguments", "reason"),
    [
        (Exit.USAGE, ["submit", "--chat", "--ids", "1,2"], "not for --ids"),
        (Exit.USAGE, ["submit", "--tenant", "a b", "hello"], "tenant: use 1 to 90 of A-Z"),
        (Exit.USAGE, ["submit", "--refuse-late", "hello"], "refuse_late: needs a deadline"),
        (Exit.USAGE, ["explain", "q", "--client", "a*"], "use 1 to 100 of A-Z"),
        (Exit.USAGE, ["requests", "--client", "[a]"], "use 1 to 100 of A-Z"),
        (Exit.USAGE, ["result", ""], "an id has 1 to 200 bytes, not 0"),
        (Exit.USAGE, ["explain", "x" * 201], "an id has 1 to 200 bytes, not 201"),
        (Exit.USAGE, ["requests", "--state", "sleeping"], "'sleeping' is not one of"),
        (Exit.USAGE, ["requests", "--older-than", "soon"], "give a time like 90, 90s, 5m, 2h"),
        (
            *(Exit.USAGE, ["requests", "--older-than", "2h", "--newer-than", "1h"]),
            "--newer-than must be longer",
        ),
        (Exit.USAGE, ["requeue"], "name requests, or give --all"),
        (Exit.USAGE, ["requeue", "--all", "never-submitted"], "name requests, or give --all"),
        (Exit.USAGE, ["dead", "requeue"], "name letters, or give --all"),
        (Exit.USAGE, ["dead", "drop", "--all", "1-1"], "name letters, or give --all"),
        (Exit.USAGE, ["pause", "--model", "m", "--worker", "w"], ALL_OR_ONE),
        (Exit.USAGE, ["pause", "--all", "--model", "m"], ALL_OR_ONE),
        (Exit.USAGE, ["pause", "--mode", "soon"], "--mode"),
        (Exit.USAGE, ["epoch", "-1"], "-1"),
        (Exit.USAGE, ["epoch"], "N"),
        (Exit.USAGE, ["models", "reload", "m", "--path", "step-200"], "give an absolute path"),
        (Exit.USAGE, ["top"], "--once"),
        (Exit.USAGE, ["info", "--count", "2"], "--interval"),
        (Exit.FAILED, ["result", "nobody"], "Error: the yard knows no request 'nobody'"),
        (Exit.FAILED, ["explain", "nobody"], "Error: the yard knows no request 'nobody'"),
        (Exit.FAILED, ["dead", "show", "1-1"], "Error: there is no dead letter '1-1'"),
    ],
)
def test_what_cannot_be_asked_of_a_yard_is_explained(
    ask: Ask, status: Exit, arguments: list[str], reason: str
) -> None:
    result = ask(*arguments)
    assert result.exit_code == status
    assert reason in result.stderr


@pytest.mark.parametrize("arguments", [["info"], ["top", "--once", "--interval", "0.1"]])
def test_a_yard_without_a_leader_sets_the_exit_status(ask: Ask, arguments: list[str]) -> None:
    result = ask("--yard", "nobody-here", *arguments)
    assert result.exit_code == Exit.UNAVAILABLE
    assert "none: nothing is dispatched" in result.stdout


@pytest.mark.parametrize("command", ["submit", "info"])
def test_a_missing_broker_is_an_error_with_a_hint(invoke: Ask, command: str) -> None:
    arguments = [command, "hello"] if command == "submit" else [command]
    result = invoke(*arguments)
    assert result.exit_code == Exit.UNAVAILABLE
    assert "tokenyard up" in result.output


@pytest.mark.parametrize("command", ["info", "pause", "doctor"])
def test_a_silent_server_is_one_line(invoke: Ask, command: str) -> None:
    result = invoke("--redis-url", "redis://127.0.0.1:1", command)
    assert result.exit_code == Exit.UNAVAILABLE
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1


def test_a_missing_example_model_is_an_error_with_a_hint() -> None:
    with pytest.raises(click.UsageError, match="--model PATH"):
        example_model("multiplier")


# Settings


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the title and the logging of the test process."""
    monkeypatch.setattr(program, "setproctitle", lambda _: None)
    monkeypatch.setattr(program, "start_logging", lambda *_, **__: None)


def run_program(settings_type: Any, *arguments: str, **env: str) -> tuple[Result, list[Any]]:
    """Run a program without effect; its result and its settings."""
    seen: list[Any] = []

    def run(settings: Any) -> int:
        seen.append(settings)
        return 7

    texts = {field.name: "x" for field in dataclasses.fields(settings_type)}
    command = program.program("worker", settings_type, run, texts=texts)
    return CliRunner().invoke(command, arguments, env=env), seen


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("settings_type", [CoordinatorSettings, WorkerSettings])
def test_settings_have_their_own_defaults(settings_type: Any) -> None:
    required = {"engine": "simulated"} if settings_type is WorkerSettings else {}
    wanted = settings_type(redis_url="redis://x", name="n", **required)
    arguments = [f"--{name}={value}" for name, value in required.items()]
    result, seen = run_program(settings_type, "--redis-url=redis://x", "--name=n", *arguments)
    assert seen == [wanted], result.output
    assert result.exit_code == 7


@pytest.mark.usefixtures("quiet")
def test_each_kind_of_option_is_read() -> None:
    result, [settings] = run_program(
        WorkerSettings,
        "--redis-url=redis://x",
        "--engine=simulated",
        "--slots=2",
        "--devices=0, 1",
        "--grace-s=1.5",
        TOKENYARD_YARD="north",
        TOKENYARD_WORKER_LEASE_MS="9000",
    )
    assert result.exit_code == 7
    assert (settings.slots, settings.devices, settings.grace_s) == (2, ("0", "1"), 1.5)
    assert (settings.yard, settings.lease_ms) == ("north", 9000)


@pytest.mark.usefixtures("quiet")
def test_every_invalid_setting_is_a_line() -> None:
    result, seen = run_program(
        WorkerSettings, "--redis-url=redis://x", "--slots=0", "--lease-ms=1", "--yard=a b"
    )
    assert not seen
    assert result.exit_code == Exit.USAGE
    assert result.output.count("Error: ") == 4  # also the model


@pytest.mark.parametrize(
    ("error", "status"), [(NoCoordinator("none"), 3), (WaitTimeout("late"), 4)]
)
def test_an_expected_error_is_a_line_and_an_exit_status(error: Exception, status: int) -> None:
    def fail() -> None:
        raise error

    result = CliRunner().invoke(PlainCommand("fail", callback=fail))
    assert result.exit_code == status
    assert result.output == f"Error: {error}\n"


@pytest.mark.parametrize("arguments", [["--debug", "info"], ["info", "--debug"]])
def test_debug_shows_the_traceback(invoke: Ask, arguments: list[str]) -> None:
    assert "BrokerUnavailable" in repr(invoke(*arguments).exception)
