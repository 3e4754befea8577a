"""Invalid UTF-8 and impossible folders: one sentence and an exit status each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Ask, StartUp, environment
from tokenyard import AsyncClient, Client, InvalidRequest
from tokenyard.process.program import Exit

LONE = "\ud800"


def program(*arguments: bytes | str, url: str = "", data: bytes = b"") -> tuple[int, str, str]:
    """Run the command; its status, standard output and standard error."""
    more = {"TOKENYARD_REDIS_URL": url} if url else {}
    done = subprocess.run(
        [sys.executable, "-m", "tokenyard", *arguments],
        env=environment(**more),
        input=data,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_an_argument_of_invalid_utf8_is_wrong_usage(invoke: Ask) -> None:
    done = invoke("--redis-url", "redis://127.0.0.1:1", "cancel", os.fsdecode(b"caf\xe9"))
    assert done.exit_code == Exit.USAGE
    assert done.stderr == "Error: the argument caf\\udce9 is not valid UTF-8\n"


def test_the_program_exits_with_the_same_status() -> None:
    assert program("submit", b"\xff")[0] == Exit.USAGE


@pytest.mark.long
@pytest.mark.parametrize("how", [["-"], ["--file", "-"], ["--file", "FILE"]])
def test_a_line_of_invalid_utf8_fails_alone(
    yard: dict[str, Any], tmp_path: Path, how: list[str]
) -> None:
    lines = b"good\n\xff\xfe bad\nbetter\n"
    (tmp_path / "lines").write_bytes(lines)
    words = [str(tmp_path / "lines") if word == "FILE" else word for word in how]
    arguments = ["submit", "--json", "--max-tokens", "2", *words]
    status, out, err = program(*arguments, url=yard["url"], data=lines)
    assert status == Exit.FAILED
    answers = [json.loads(line) for line in out.splitlines()]
    assert [one["status"] for one in answers] == ["completed", "failed", "completed"]
    assert [one["prompt"] for one in answers] == ["good", "\\udcff\\udcfe bad", "better"]
    assert "INVALID_REQUEST: prompt: is no valid Unicode" in err
    assert err.count("\n") == 1


def test_a_url_of_invalid_utf8_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenyard", "info"],
        env={
            **{k.encode(): v.encode() for k, v in environment().items()},
            b"TOKENYARD_REDIS_URL": b"redis://\xff",
        },
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == Exit.USAGE
    assert done.stderr.startswith(b"Error: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("url", ["redis://[x", "redis://a..b:1", "redis://:pw@[", "redis:// "])
def test_an_invalid_url_is_one_line_without_its_password(invoke: Ask, url: str) -> None:
    done = invoke("--redis-url", url, "info")
    assert done.exit_code in {Exit.USAGE, Exit.UNAVAILABLE}
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "pw" not in done.stderr


BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": LONE}),
    ("id", {"id": LONE}),
    ("model", {"model": LONE}),
    ("metadata", {"metadata": {"a": [LONE]}}),
    ("session", {"session": LONE}),
    ("params.stop", {"stop": ["x", LONE]}),
    ("messages", {"prompt": [{"role": "user", "content": LONE}]}),
]


@pytest.mark.parametrize(("field", "given"), BAD)
def test_clients_name_the_field_with_invalid_text(
    yard: dict[str, Any], field: str, given: dict[str, Any]
) -> None:
    options = {"prompt": "hello", "max_tokens": 2} | given
    with Client(yard["url"]) as client:
        with pytest.raises(InvalidRequest) as failed:
            client.submit(**options)
        assert failed.value.field == field
        (_, bad), (_, good) = client.map([options, {"prompt": "hello"}], ordered=True)
    assert bad.error
    assert bad.error.message.startswith(f"{field}: is no valid Unicode")
    assert good.ok


def test_clients_refuse_an_id_with_invalid_text(yard: dict[str, Any]) -> None:
    with Client(yard["url"]) as client:
        for look in (client.attach, client.status, client.cancel):
            with pytest.raises(InvalidRequest, match="no valid Unicode"):
                look(LONE)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_clients_refuse_shared_options_with_invalid_text(kind: Any) -> None:
    client = kind("redis://127.0.0.1:1")
    with pytest.raises(InvalidRequest, match=r"params\.stop: is no valid Unicode"):
        client._core.builder.prepare_many(["a"], {"stop": [LONE]})


# Folders and ports of `up`


def folders(tmp_path: Path) -> list[tuple[str, str]]:
    (tmp_path / "file").write_text("")
    return [(str(tmp_path / "file"), "is a file"), ("/proc/x", "cannot be written to")]


@pytest.mark.parametrize("number", [0, 1])
def test_an_impossible_data_folder_is_wrong_usage(invoke: Ask, tmp_path: Path, number: int) -> None:
    folder, why = folders(tmp_path)[number]
    done = invoke("up", "--engine", "simulated", "--data-dir", folder)
    assert done.exit_code == Exit.USAGE
    assert why in done.stderr
    assert folder in done.stderr


def test_an_unwritable_folder_of_logs_is_one_line(start_up: StartUp, tmp_path: Path) -> None:
    """Given a file in place of the folder of logs, I expect an error with its name."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "logs").write_text("")
    up = start_up(data_dir=data)
    assert up.wait() == Exit.FAILED
    assert up.said.splitlines()[-1] == f"Error: {data}/logs: File exists"
    assert "Traceback" not in up.said


def test_a_port_in_use_is_one_line(start_up: StartUp) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        up = start_up("--port", port, port=False)
        assert up.wait() == Exit.UNAVAILABLE
    assert f"Error: port {port}: Address already in use" in up.said.splitlines()[-1]
    assert "Traceback" not in up.said
