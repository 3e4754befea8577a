"""`tokenyard completion`, and its proposals in a shell."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.cli.running import Ask, environment, tokenyard, write_program
from tests.support.waiting import eventually
from tokenyard.process.program import Exit

Propose = Callable[..., list[str]]


@pytest.fixture
def propose(tmp_path: Path) -> Propose:
    """A function that returns bash's proposals for the last word, with Tokenyard's script."""
    write_program(tmp_path / "tokenyard", f'exec "{sys.executable}" -m tokenyard "$@"')
    bash = shutil.which("bash")
    if bash is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("bash is not installed")
    script = (
        'eval "$(tokenyard completion bash)"; COMP_WORDS=(tokenyard "$@"); COMP_CWORD=$#;'
        ' _tokenyard_completion tokenyard; printf "%s\\n" "${COMPREPLY[@]}"'
    )

    def run(*typed: str, url: str = "") -> list[str]:
        more = {"TOKENYARD_REDIS_URL": url} if url else {"XDG_DATA_HOME": str(tmp_path)}
        done = subprocess.run(
            [bash, "-c", script, "bash", *typed],
            env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}", **more),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return run


@pytest.fixture
def proposed(propose: Propose) -> Propose:
    """The same, repeated until a proposal comes: a busy machine may need more than 0.5 s."""
    return lambda *typed, **options: eventually(lambda: propose(*typed, **options), timeout_s=60.0)


@pytest.mark.long
def test_commands_and_options_are_proposed(propose: Propose) -> None:
    assert propose("doc") == ["doctor"]
    assert propose("batch", "res") == ["resume", "results"]
    assert propose("requests", "--scan") == ["--scan-limit"]


@pytest.mark.long
def test_names_of_workers_and_models_are_proposed(
    propose: Propose, proposed: Propose, yard: dict[str, Any]
) -> None:
    workers = proposed("pause", "--worker", "", url=yard["url"])

    assert len(workers) == 2
    assert proposed("drain", "--worker", workers[0][:-1], url=yard["url"]) == workers
    assert proposed("submit", "--model", "sim", url=yard["url"]) == ["simulated"]
    assert proposed("models", "unload", "s", url=yard["url"]) == ["simulated"]
    # I expect options before the command to count
    assert proposed("--redis-url", yard["url"], "submit", "--model", "") == ["simulated"]
    assert propose("--redis-url", yard["url"], "--yard", "no", "submit", "--model", "") == []


@pytest.mark.long
def test_batch_jobs_are_proposed(proposed: Propose, yard: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "1", "prompt": "hello"}\n')
    asked = ["--redis-url", yard["url"], "batch", "submit", str(file)]
    done = tokenyard(*asked, "-o", str(tmp_path / "out.jsonl"), "--json")
    assert done.returncode == Exit.OK, done.stderr
    with redis.Redis.from_url(yard["url"]) as connection:
        try:
            [job] = proposed("batch", "status", "", url=yard["url"])
            assert job in done.stdout
            assert proposed("batch", "submit", "--after", "", url=yard["url"]) == [job]
        finally:
            for key in connection.scan_iter("rq:*"):
                connection.delete(key)


@pytest.mark.long
def test_without_a_broker_nothing_is_proposed(propose: Propose) -> None:
    assert propose("pause", "--worker", "") == []
    assert propose("pause", "--worker", "", url="redis://127.0.0.1:1") == []
    assert propose("pause", "--worker", "", url="nonsense://") == []


@pytest.mark.long
def test_a_silent_broker_gives_no_proposals(propose: Propose) -> None:
    # Given a server that accepts connections and never answers
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"

        assert propose("pause", "--worker", "", url=url) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(invoke: Ask, shell: str) -> None:
    done = invoke("completion", shell)

    assert done.exit_code == Exit.OK
    assert f"_TOKENYARD_COMPLETE={shell}_complete" in done.stdout
