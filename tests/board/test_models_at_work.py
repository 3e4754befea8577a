"""What operators do with models on the board, on a running yard of simulated workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.board.looking import Looker, looking, text_of
from tests.cli.running import Up
from tests.support.waiting import eventually
from tokenyard.protocol.keys import Keys

MODELS = """
[models.one]
path = "org/one"
[models.two]
path = "org/two"
"""
#: Slow enough that the page can show a load.
SLOW_LOADS = {"TOKENYARD_WORKER_SIMULATED_LOAD_S": "3"}


@pytest.fixture
def at_board(
    no_leftover_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Looker]:
    """The board of a yard with two devices and two models."""
    (tmp_path / "models.toml").write_text(MODELS)
    options = ("--models", str(tmp_path / "models.toml"), "--sleepers", "1", "--grace-s", "1")
    up = Up(tmp_path, *options, env=SLOW_LOADS)
    try:
        url = str(up.wait_ready()["url"])
        with (
            redis.Redis.from_url(url) as connection,
            looking(monkeypatch, url, connection, Keys("main")) as looker,
        ):
            yield looker
    finally:
        up.end()


@pytest.mark.long
def test_a_model_is_loaded_put_to_sleep_woken_and_unloaded(at_board: Looker) -> None:
    def shows(pattern: str, path: str = "/model") -> str:
        """What a page shows, once it does."""

        def found() -> str:
            page = at_board.get(path, parameters={"name": "one"})
            match = re.search(pattern, text_of(page))
            return match[0] if match else ""

        return eventually(found)

    at_board.do("model.load", {"model": "one", "why": "the test wants it"})
    assert shows(r"loads for", "/devices")
    assert shows(r"Workers 1 ready")
    assert shows(r"the test wants it done")  # the worker's answer
    assert shows(r"Last load [3-9]\.\d s")
    assert shows(r"Loaded in [3-9]\.\d s", "/devices")

    at_board.do("model.sleep", {"model": "one"})
    assert shows(r"Workers 1 asleep")
    at_board.do("model.wake", {"model": "one"})
    assert shows(r"Workers 1 ready")

    done = at_board.do("model.reload", {"model": "one", "path": "/step-1"})
    assert "one: /step-1, in epoch 1." in done.text  # it has begun, or ended already
    assert shows(r"Weights /step-1 Epoch 1")
    assert shows(r"RUNNING /step-1 1")  # its worker

    at_board.do("model.unload", {"model": "one"})
    assert shows(r"Workers none")
