"""Position of options, suggestions for names, lists, plurals, and the rate of logs."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import redis

from tests.cli.running import Ask, Command, StartUp, python
from tests.cli.test_commands_page import LEAVES
from tests.support.builders import random_name
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.cli import main
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.keys import Keys

NOBODY = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    "words",
    [
        ["--redis-url", "URL", "--yard", "YARD", "--json", "info"],
        ["info", "--redis-url", "URL", "--yard", "YARD", "--json"],
        ["--json", "info", "--yard=YARD", "--redis-url=URL"],
        [
            "--redis-url",
            NOBODY,
            "--yard",
            "another",
            "info",
            "--redis-url",
            "URL",
            "--yard",
            "YARD",
        ],
    ],
)
def test_options_may_precede_or_follow_the_command_and_the_last_counts(
    invoke: Ask, yard: dict[str, Any], words: list[str]
) -> None:
    name = random_name("yard")
    done = invoke(*(word.replace("URL", yard["url"]).replace("YARD", name) for word in words))
    # The error about the missing leader names the right yard
    assert done.exit_code == Exit.UNAVAILABLE
    assert name in done.stdout
    assert done.stdout.startswith("{") == ("--json" in words)


@pytest.mark.parametrize("at", range(3))
def test_options_may_follow_each_word_of_a_group(
    invoke: Ask, yard: dict[str, Any], at: int
) -> None:
    words = ["models", "list"]
    words[at:at] = ["--json", "--redis-url", yard["url"]]
    done = invoke(*words)
    assert done.exit_code == Exit.OK, done.output
    assert json.loads(done.stdout)["models"][0]["name"] == "simulated"


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_every_command_takes_the_shared_options(name: str) -> None:
    command = LEAVES[name]
    assert isinstance(command, PlainCommand)
    context = click.Context(command, parent=click.Context(main))
    known = {text for param in command.get_params(context) for text in param.opts}
    assert {"--redis-url", "--yard", "--debug"} <= known


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, command in sorted(LEAVES.items())
        if not any("--json" in param.opts for param in command.params)
    ],
)
def test_json_before_a_command_without_it_is_refused(invoke: Ask, name: str) -> None:
    arguments = (one for one in LEAVES[name].params if isinstance(one, click.Argument))
    words = [
        "bash" if isinstance(one.type, click.Choice) else "1" for one in arguments if one.required
    ]
    done = invoke("--redis-url", NOBODY, "--json", *name.split(), *words)
    assert done.exit_code == Exit.USAGE
    assert f"{name} has no output in JSON" in done.stderr


# Suggestions


def test_misspelled_commands_get_a_suggestion(invoke: Ask) -> None:
    for words, meant in ((["sumbit"], "submit"), (["dead", "lsit"], "list")):
        done = invoke(*words)
        assert done.exit_code == Exit.USAGE
        assert f"No such command {words[-1]!r}. Did you mean {meant!r}?" in done.stderr
    assert "Did you mean" not in invoke("qqqq").stderr


def test_misspelled_models_and_parameters_get_a_suggestion(ask: Ask) -> None:
    assert "did you mean simulated?" in ask("submit", "--model", "simulatd", "a").stderr
    wrong = ask("submit", "--param", "temprature=0", "a")
    assert wrong.exit_code == Exit.USAGE
    assert "did you mean temperature?" in wrong.stderr


def test_a_misspelt_model_ends_a_batch_before_its_first_line(ask: Ask, tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(number), "prompt": "hello"}) for number in range(3)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    words = ["batch", "run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    done = ask(*words, "--model", "simulatd")
    assert done.exit_code == Exit.FAILED
    assert "there is no model 'simulatd'; did you mean simulated?" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]  # no output was begun
    done = ask(*words, "--model", "simulated")
    assert done.exit_code == Exit.OK, done.stderr
    assert "3 input lines = 3 results + 0 errors" in done.stdout


def test_misspelled_variables_are_refused_with_a_suggestion(
    invoke: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENYARD_COORDINATOR_LAESE_MS", "100")
    for command in ("coordinator", "up", "demo"):
        done = invoke("--redis-url", NOBODY, command)
        assert done.exit_code == Exit.USAGE, command
        assert "did you mean TOKENYARD_COORDINATOR_LEASE_MS?" in done.stderr
    assert "LAESE" not in invoke("--redis-url", NOBODY, "info").stderr
    monkeypatch.setenv("TOKENYARD_REDIS_URI", "redis://elsewhere")
    done = invoke("info")
    assert done.exit_code == Exit.USAGE
    assert "did you mean TOKENYARD_REDIS_URL?" in done.stderr


def test_an_unknown_setting_is_a_warning() -> None:
    done = python("-m", "coordinator", env={"TOKENYARD_COORDINATOR_QQQQ": "1"})
    assert "Warning: nothing reads the variable TOKENYARD_COORDINATOR_QQQQ" in done.stderr


# Lists, files, plurals


@pytest.mark.parametrize("words", [["dead", "list"], ["batch", "list"]])
def test_an_empty_list_is_an_empty_array(
    invoke: Ask, valkey_broker: Server, keys: Keys, words: list[str]
) -> None:
    done = invoke("--redis-url", valkey_broker.url, "--yard", keys.yard, *words, "--json")
    assert done.exit_code == Exit.OK, done.output
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["submit", "--file", "/nowhere"],
        ["batch", "run", "/nowhere", "-o", "OUT"],
        ["batch", "submit", "/nowhere", "-o", "OUT"],
        ["batch", "run", "/nowhere", "--dry-run"],
        ["up", "--models", "/nowhere"],
        ["up", "--model", "/nowhere"],
        ["worker", "--models", "/nowhere"],
    ],
)
def test_a_missing_file_is_wrong_usage_everywhere(
    ask: Ask, tmp_path: Path, words: list[str]
) -> None:
    done = ask(*(word.replace("OUT", str(tmp_path / "out")) for word in words))
    assert done.exit_code == Exit.USAGE, done.output
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_singular_and_plural_in_messages(start_up: StartUp, invoke: Ask) -> None:
    up = start_up("--workers", "1")
    url = str(up.wait_ready()["url"])
    assert "Starting 1 worker, " in up.said
    assert "1 of 1 worker is ready" in up.said
    assert "simulated (1 worker)" in invoke("--redis-url", url, "info").stdout
    assert (
        "1 of 1 worker ready, 0 dead letters"
        in invoke("--redis-url", url, "top", "--once", "--interval", "0.1").stdout
    )


# Logs of long-lived programs

#: The program, for which no time passes while it waits for a server.
TIMELESS = """
import tokenyard.__main__
from tests.support.fake_clock import FakeClock
from tokenyard import clock
clock.use(FakeClock(is_held=True))
tokenyard.__main__.run()
"""


@pytest.mark.long
@pytest.mark.parametrize("program", [["coordinator"], ["worker", "--engine", "simulated"]])
def test_log_rate_is_limited_while_redis_is_absent(tmp_path: Path, program: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs_up:
        port = hangs_up.getsockname()[1]
        url = f"redis://ann:secret@127.0.0.1:{port}/0"
        arguments = ("--redis-url", url, *program)
        with Command(tmp_path / "log", *arguments, python=("-c", TIMELESS)) as command:
            # Given a dozen attempts in no time, of which each is hung up on in the same way
            for _ in range(12):
                with hangs_up.accept()[0] as connection:
                    connection.recv(1000)
            eventually(lambda: f"Redis at redis://ann@127.0.0.1:{port}/0 does not" in command.said)
            assert command.said.count("does not answer") == 1
            assert command.process.poll() is None
        assert "secret" not in command.said
        assert "Traceback" not in command.said


def test_a_wrong_password_is_named_with_the_user(
    tmp_path: Path, new_server: Callable[..., Server], invoke: Ask
) -> None:
    server = new_server("valkey", aof=False)
    with redis.Redis.from_url(server.url) as connection:
        connection.acl_setuser("ann", enabled=True, passwords=["+right"], keys=["*"])
    url = server.url.replace("://", "://ann:wrong@")
    named = f"Redis at {server.url.replace('://', '://ann@')} refuses the user or password"
    done = invoke("--redis-url", url, "info")
    assert done.exit_code == Exit.UNAVAILABLE
    assert named in done.stderr
    with Command(tmp_path / "log", "--redis-url", url, "coordinator") as coordinator:
        eventually(lambda: named in coordinator.said)
    assert "wrong" not in done.stderr + coordinator.said.replace("wrong number", "")


@pytest.mark.long
def test_a_standby_logs_who_leads(tmp_path: Path, valkey_broker: Server, keys: Keys) -> None:
    where = ["--redis-url", valkey_broker.url, "--yard", keys.yard, "coordinator", "--name"]
    with Command(tmp_path / "first", *where, "north") as first:
        eventually(lambda: "leads as 1:north" in first.said)
        with Command(tmp_path / "second", *where, "south") as second:
            eventually(lambda: "stands by: north leads" in second.said)
            first.process.terminate()
            first.process.wait(30)
            eventually(lambda: "leads as 2:south" in second.said)
            assert second.said.count("stands by") == 1
