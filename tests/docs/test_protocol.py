"""docs/protocol.md leaves out nothing that crosses the wire."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import pytest
import redis

from tests.docs.pages import ROOT, first_names, names, page, rows, section
from tests.support.up import running_up
from tokenyard.protocol.control import (
    ALL,
    PAUSE_MODES,
    RUN_STATES,
    SIGNALS,
    Acknowledgement,
    Command,
    DesiredState,
    Order,
    Verb,
)
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import PRIORITY_CLASSES, Keys
from tokenyard.protocol.leader_reports import FIELD, LAST, LAST_FOUND
from tokenyard.protocol.replies import (
    Choice,
    ErrorInfo,
    Provenance,
    Reply,
    Status,
    Timing,
    Usage,
    decode_reply,
)
from tokenyard.protocol.wire import (
    SYSTEM_FIELDS,
    ChatOptions,
    PoolingParams,
    Request,
    SamplingParams,
    StructuredOutputs,
    request_fields,
)
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerInfo, WorkerTotals

PROTOCOL = page("docs/protocol.md")
SCRIPTS = sorted(file.stem for file in (ROOT / "tokenyard/scripts/lua").glob("*.lua"))
INCLUDES = sorted(
    f"include/{file.stem}" for file in (ROOT / "tokenyard/scripts/lua/include").glob("*.lua")
)


def every_request_field() -> set[str]:
    prompts: list[dict[str, Any]] = [
        {"tokens": b"\0\0\0\0"},
        {"prompt": "p"},
        {"messages": [{"role": "user"}]},
        {"inputs": ["i"]},
    ]
    shared: dict[str, Any] = {
        "id": "q",
        "client": "c",
        "model": "m",
        "task": "score",
        "pooling": PoolingParams(dimensions=1),
        "query": "q",
        "stream": True,
        "stream_interval_ms": 1,
        "reply_to": "replies:c",
        "priority": 1,
        "deadline_ms": 1,
        "result_ttl_s": 1,
        "tenant": "t",
        "session": "s",
        "metadata": {"k": 1},
        "chat": ChatOptions(
            tools=[],
            documents=[],
            chat_template_kwargs={"k": 1},
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        "cache_salt": "s",
        "reasoning_ended": True,
        "reasoning_parser_kwargs": {"k": 1},
        "media": {"image": ["media:x"]},
    }
    fields = set().union(*(request_fields(Request(**one, **shared)) for one in prompts))
    # With `v`, without `stated`; those of the chat in the place of `chat`; `params` for two.
    own = len(Request.__struct_fields__) + len(ChatOptions.__struct_fields__) - 2
    assert len(fields) == own
    return fields


def test_every_request_field_is_in_the_table_and_none_that_is_not() -> None:
    assert first_names(section(PROTOCOL, "## Requests")) == every_request_field() | {"common"}


def test_the_fields_of_the_system_are_named() -> None:
    assert {field.decode() for field in SYSTEM_FIELDS} <= names(section(PROTOCOL, "## Requests"))


def test_every_sampling_parameter_is_in_the_table_and_none_that_is_not() -> None:
    text = section(PROTOCOL, "## Sampling parameters")
    assert first_names(text) == set(SamplingParams.__struct_fields__)
    assert set(StructuredOutputs.__struct_fields__) <= names(text)


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_the_defaults_of_sampling_parameters_are_right(name: str) -> None:
    told = {
        row[0].strip("`"): row[2]
        for line in section(PROTOCOL, "## Sampling parameters").splitlines()
        if line.startswith("| `") and (row := [cell.strip() for cell in line[1:-1].split("|")])
    }
    default = getattr(SamplingParams(), name)
    if name == "detokenize":  # follows the prompt
        return
    expected = "null" if default is None else f"{default:g}"
    if isinstance(default, bool):
        expected = str(default).lower()
    assert told[name] == expected


def test_every_reply_field_is_in_the_table_and_none_that_is_not() -> None:
    text = section(PROTOCOL, "## Replies")
    assert first_names(text) == set(Reply.__struct_fields__)
    for struct in (Usage, ErrorInfo, Provenance, Timing, Choice):
        assert set(struct.__struct_fields__) <= names(text), struct.__name__


def test_every_status_and_error_code_is_told() -> None:
    assert set(get_args(Status)) <= names(section(PROTOCOL, "## Replies"))
    assert first_names(section(PROTOCOL, "## Errors")) == set(Code)


def test_every_key_is_in_the_table() -> None:
    keys = Keys("main")
    client, request = "<client>", "<id>"
    built = {keys.intake(name) for name in ("high", "normal", "low", "retry")}
    built |= {keys.lane("<worker>"), keys.replies(client), keys.attached(client)}
    built |= {keys.cancels(client), keys.stored(client), keys.replies("<name>.<32 hex digits>")}
    built |= {keys.acks("<command>"), keys.board_session("<digest>")}
    built |= {
        make(client, request)
        for make in (keys.ledger, keys.tokens, keys.choices, keys.media, keys.reply)
    }
    built |= {keys.tenant("<tenant>"), keys.usage("<tenant>")}
    built |= {keys.intake(f"{name}:<tenant>") for name in PRIORITY_CLASSES}
    built |= {keys.http_record(client, request), keys.response(client, request)}
    built |= {
        getattr(keys, name)
        for name, kind in vars(Keys).items()
        if isinstance(kind, cached_property)
    }
    rests = {key.removeprefix("tokenyard:{main}:") for key in built}
    assert first_names(section(PROTOCOL, "## Keys")) == rests


def test_the_handshake_is_complete() -> None:
    written = set(re.findall(r'^ +"(\w+)": ', page("coordinator/handshake.py"), re.MULTILINE))
    for script in SCRIPTS:
        text = _code_of(script)
        written |= set(re.findall(r"(?:'HINCRBY', |next_in\()KEYS\[\d\], '(\w+)'", text))
    assert {"protocol", "epoch", "incarnation"} <= written
    written |= {LAST, LAST_FOUND, FIELD}
    assert first_names(section(PROTOCOL, "## The handshake")) == written


def test_every_ledger_field_is_told() -> None:
    written = set()
    for script in [*SCRIPTS, *INCLUDES]:
        calls = re.findall(
            r"(?:'(?:HSET|HSETNX)', |count_up\()ledger,(.*?)\)", _code_of(script), re.DOTALL
        )
        written |= {word for call in calls for word in re.findall(r"'(\w+)'", call)}
        if "'HSETNX', key, ARGV[i]," in _code_of(script):
            written |= set(re.findall(r'notes \+= \["(\w+)"', page("tokenyard/scripts/worker.py")))
        written |= set(re.findall(r"notes=.*?\{'(\w+)'", _code_of(script).replace(" = ", "=")))
    # `t` and `r` stand before the number of an attempt, `_alone` behind what became of a worker.
    written |= {"crashed_alone", "lost_alone"} if "_alone" in written else set()
    told = {
        name.removesuffix("<attempt>") for name in first_names(section(PROTOCOL, "## The ledger"))
    }
    assert told <= written
    values = {"choice", "waiting", "assigned", "retry", "cancelled", "failed", "crashed", "_alone"}
    assert written - told <= values


def _code_of(script: str) -> str:
    return page(f"tokenyard/scripts/lua/{script}.lua")


def test_every_roster_field_and_event_is_told() -> None:
    told = names(section(PROTOCOL, "### The roster"))
    for struct in (WorkerInfo, WorkerTotals):
        assert set(struct.__struct_fields__) <= told, struct.__name__
    events = set()
    for script in SCRIPTS:
        events |= set(re.findall(r"'event', '(\w+)'", _code_of(script)))
    assert "capacity" in events
    assert events <= names(section(PROTOCOL, "### Events"))


def test_every_field_of_hosts_and_commands_is_told() -> None:
    hosts, commands = section(PROTOCOL, "### Hosts"), section(PROTOCOL, "### Commands")
    for struct in (HostInfo, ModelInfo):
        assert set(struct.__struct_fields__) <= names(hosts), struct.__name__
    for struct in (Command, Acknowledgement):
        assert set(struct.__struct_fields__) <= names(commands), struct.__name__
    assert set(get_args(Verb)) <= names(commands)


def test_everything_about_signals_is_told() -> None:
    text = section(PROTOCOL, "### Signals")
    assert first_names(text) == set(DesiredState.__struct_fields__)
    assert {*Order.__struct_fields__, *SIGNALS, *RUN_STATES, *PAUSE_MODES, ALL} <= names(text)


def _told_of_scripts() -> dict[str, str]:
    """What the page says of each script: in a section of its own, or in a row."""
    headings = re.findall(r"^### ([a-z_]+)$", PROTOCOL, re.MULTILINE)
    told = {name: section(PROTOCOL, f"### {name}") for name in headings}
    table = rows(section(PROTOCOL, "### The other scripts"))
    return told | {row[0].strip("`"): " ".join(row[1:]) for row in table}


def test_every_script_is_told() -> None:
    assert sorted(_told_of_scripts()) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_code_that_a_script_returns_is_told(script: str) -> None:
    text = _told_of_scripts()[script]
    declared = re.findall(r"^local [A-Z_, ]+ = ([-\d, ]+)$", _code_of(script), re.MULTILINE)
    codes = {number for line in declared for number in line.split(", ") if int(number) < 100}
    missing = {number for number in codes if not re.search(rf"(?<![\w-]){number}(?!\d)", text)}
    assert not missing


@pytest.mark.timeout(180)
def test_the_whole_client_of_the_page_works(no_leftover_processes: None, tmp_path: Path) -> None:
    program = ROOT / "examples/minimal_client.py"
    assert f"(../{program.relative_to(ROOT)})" in PROTOCOL
    with running_up(tmp_path, "--engine", "simulated", "--workers", "1") as up:
        where = urlsplit(up.url)
        command = [sys.executable, "-I", str(program), str(where.hostname), str(where.port)]
        command.append("12+34=")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        with redis.Redis.from_url(up.url) as connection:
            [ledger] = connection.keys("tokenyard:{main}:request:anon/*")
            result = decode_reply(connection.hget(ledger, "result"))
    assert result.status == "completed"
    assert done.stdout == f"{result.text}\n"
