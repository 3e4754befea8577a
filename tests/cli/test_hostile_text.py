"""Clients' texts move no cursor: each command prints a yard full of hostile names."""

from __future__ import annotations

import datetime
import json
import logging
import unicodedata
from collections.abc import Iterator

import msgspec
import pytest
import redis
from click.testing import CliRunner, Result

from tests.cli.test_commands_page import LEAVES
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.cli import main
from tokenyard.process.logs import HarmlessFormatter
from tokenyard.protocol.replies import ErrorInfo, Reply, encode_reply, json_text
from tokenyard.protocol.texts import harmless, harmless_json, printable
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, encode_host

#: Colours, a title, a bell, line breaks, right-to-left text, and C1's own escape.
EVIL = "\x1b[31m\x1b]0;title\x07\r\nFORGED: line\n\u202edlrow\u2066 \x9b2J \x00\x7f \u2028FORGED"
ID = f"evil-{EVIL}"

#: The arguments of each command; there are two dead letters as ``{letter}``.
CALLS: dict[str, list[list[str]]] = {
    "submit": [
        ["hello", "--id", ID],
        ["hello", "--model", ID],
        ["hello", "--json", "--id", "asked"],
        ["hello", "--id", "told", "--verbose"],
    ],
    "requests": [[], ["--client", "evil"], ["--json"]],
    "result": [[ID, "--client", "evil"], ["unknown" + EVIL], [ID, "--client", "evil", "--json"]],
    "cancel": [
        ["waits" + EVIL, "--client", "evil"],
        ["unknown" + EVIL],
        ["unknown" + EVIL, "--json"],
    ],
    "explain": [[ID, "--client", "evil"], ["waits" + EVIL, "--client", "evil"], ["no" + EVIL]],
    "dead list": [[], ["--json"]],
    "dead show": [["{letter}"], ["{letter}", "--json"], [EVIL]],
    "dead requeue": [["{letter}"], [EVIL]],
    "dead drop": [["{letter}"], [EVIL]],
    "audit": [[], ["--json"]],
    "requeue": [[ID, "--client", "evil"], [ID]],
    "models list": [[], ["--verbose"], ["--json"]],
    "models load": [["sim", "--worker", "none" + EVIL, "--timeout-s", "1"]],
    "models reload": [["sim" + EVIL, "--to", "/x" + EVIL, "--timeout-s", "1"]],
    "models sleep": [["sim" + EVIL, "--timeout-s", "1"]],
    "models unload": [["sim" + EVIL, "--timeout-s", "1"]],
    "models wake": [["sim" + EVIL, "--timeout-s", "1"]],
    "pause": [["--why", EVIL, "--timeout-s", "5"], ["--why", EVIL, "--timeout-s", "5"]],
    "tenants list": [[], ["--json"]],
    "tenants show": [["evil"], ["evil", "--json"], [EVIL]],
    "tenants remove": [["evil"], [EVIL]],
    "tenants usage": [[], ["evil", "--verbose"], ["--json"], [EVIL]],
    "info": [[], ["--json"]],
    "top": [["--once"]],
    "doctor": [["--all"], ["--all", "--json"]],
    "unpause": [["--model", "sim" + EVIL, "--timeout-s", "1"], ["--timeout-s", "5"]],
    "suspend": [["--model", "sim" + EVIL, "--why", EVIL, "--timeout-s", "1"]],
    "resume": [["--model", "sim" + EVIL, "--timeout-s", "1"]],
    "epoch": [["3", "--model", "sim" + EVIL, "--timeout-s", "1"]],
    "empty": [["--model", "sim" + EVIL, "--yes"], ["--yes"]],
    "drain": [["--worker", "none" + EVIL, "--timeout-s", "1"]],
    "stop": [["--worker", "none" + EVIL, "--timeout-s", "1"]],
}
#: Commands that print no text of a client, and the reason.
NOTHING = {
    **dict.fromkeys(["up", "demo"], "run a yard or requests of their own"),
    **dict.fromkeys(["board", "bridge", "coordinator", "gateway", "worker"], "log: see below"),
    "completion": "prints a script for shells",
    **dict.fromkeys(["keys create", "keys list", "keys revoke"], "show what operators wrote"),
    **dict.fromkeys(["tenants apply", "tenants set"], "show what operators wrote"),
    **dict.fromkeys(
        [
            *("batch run", "batch submit", "batch worker", "batch list", "batch status"),
            *("batch cancel", "batch resume", "batch results", "batch logs"),
        ],
        "show jobs of operators; all of it passes the same `say`",
    ),
}


def moves(text: str) -> list[str]:
    """Characters that control a terminal or the direction of a text."""
    bad = {"Cc", "Cf", "Zl", "Zp", "Cs"}
    return [one for one in text if unicodedata.category(one) in bad and one not in "\n\t"]


@pytest.fixture(scope="module")
def plant(valkey_broker: Server) -> Iterator[Plant]:
    """A yard in which every text of a client is hostile."""
    with Plant(valkey_broker.url) as plant:
        plant.up()
        plant.wait_for_leader()
        yield plant


@pytest.fixture
def letters(plant: Plant) -> list[str]:
    """Write the hostile texts again for each test; the ids of two dead letters."""
    run, keys = plant.connection, plant.keys
    run.delete(keys.dead, keys.ledger("evil", ID))
    error = json_text(ErrorInfo("POISONED" + EVIL, "it said " + EVIL))
    result = Reply(id=ID, event="result", seq=0, tokens=b"", status="failed", error=error)
    ledger = {
        "state": "failed",
        "sid": "normal/1-0",
        "result": encode_reply(result),
        "ended": "1",
        "reason": EVIL,
        "worker": "w.1" + EVIL,
        "attempt": "1",
        "t1": f"1-0 w.1 because {EVIL}",
        "r1": f"2 w.1 crashed {EVIL}",
    }
    run.hset(keys.ledger("evil", ID), mapping=ledger)  # type: ignore[arg-type]
    waits = {"id": "waits" + EVIL, "client": "evil", "prompt": EVIL, "model": "sim" + EVIL}
    run.xadd(keys.intake("low"), {**waits, "session": EVIL, "params": EVIL})  # type: ignore[arg-type]
    settings = {"evil": '{"models":["m\\u001b' + EVIL[1:4] + '"]}', "x" + EVIL: "{}"}
    run.hset(keys.tenants, mapping=settings)  # type: ignore[arg-type]
    run.zadd(keys.service, {"evil": 1, "y" + EVIL: 2})
    run.hset(keys.usage("evil"), f"{datetime.datetime.now(datetime.UTC):%Y%m%d} m{EVIL} in", 3)
    models = [ModelInfo(name="large" + EVIL, fault="no " + EVIL)]
    host = HostInfo(name="host", host=EVIL, models=models)
    run.hset(keys.hosts, "host", encode_host(host))
    letter = {**waits, "id": ID, "dead_reason": f"POISONED: {EVIL}", "dead_sid": "normal/1-0"}
    names = [run.xadd(keys.dead, {**letter, EVIL: EVIL}) for _ in range(2)]  # type: ignore[dict-item]
    return [name.decode() for name in names]


def call(plant: Plant, command: str, arguments: list[str]) -> Result:
    options = ["--redis-url", plant.url, "--yard", plant.keys.yard]
    return CliRunner().invoke(main, [*options, *command.split(), *arguments])


def test_each_command_has_a_case() -> None:
    assert LEAVES.keys() == CALLS.keys() | NOTHING.keys()


@pytest.mark.parametrize("command", CALLS)
def test_no_command_moves_the_cursor(plant: Plant, letters: list[str], command: str) -> None:
    seen = ""
    for arguments in CALLS[command]:
        given = [
            one.format(letter=letters.pop()) if one == "{letter}" else one for one in arguments
        ]
        done = call(plant, command, given)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert moves(done.output) == [], (given, done.output)
        assert not any(line.startswith("FORGED") for line in done.output.split("\n")), done.output
        assert "Traceback" not in done.output
        if "--json" in given and done.exit_code == 0:
            try:
                json.loads(done.stdout)
            except json.JSONDecodeError:  # one object on each line
                [json.loads(line) for line in done.stdout.splitlines()]
        seen += done.output
    assert seen


def test_log_lines_of_hostile_requests_stay_single(plant: Plant) -> None:
    # Given cancelled requests with hostile ids, and one that cannot be answered
    with Client(plant.url, plant.keys.yard, "evil") as client:
        client.submit([1], id="log" + EVIL, model="sim", cancel_on_disconnect=True, max_tokens=1)
    fields = {"id": "unread" + EVIL, "client": EVIL, "prompt": "x"}
    plant.connection.xadd(plant.keys.intake("normal"), fields)  # type: ignore[arg-type]
    eventually(lambda: plant.connection.xlen(plant.keys.dead))
    for program in plant.programs:
        assert moves(program.log) == []
        assert "\nFORGED" not in program.log


@pytest.mark.parametrize("value", [EVIL, ValueError(EVIL), EVIL.encode(), redis.RedisError(EVIL)])
def test_a_record_is_one_line(value: object) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "got %s of %d", (value, 3), None)
    line = HarmlessFormatter().format(record)
    assert moves(line) == []
    assert "\n" not in line
    assert "of 3" in line


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as fault:
        about = (ValueError, fault, fault.__traceback__)
    record = logging.LogRecord("x", logging.INFO, "", 0, "failed", (), about)
    lines = HarmlessFormatter().format(record)
    assert len(lines.splitlines()) > 3
    assert moves(lines) == []


def test_only_control_characters_are_escaped() -> None:
    assert moves(printable(EVIL)) == moves(harmless(EVIL)) == []
    assert "\n" not in printable(EVIL)
    for text in ("Grüße, 世界 👋", "a\\b"):
        assert printable(text) == harmless(text) == text
    packed = msgspec.json.encode({"x": EVIL})
    assert json.loads(harmless_json(packed.decode())) == {"x": EVIL}
    assert moves(harmless_json(packed.decode())) == []
