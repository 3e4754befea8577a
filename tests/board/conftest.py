"""Boards and the yards that they show."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import redis

from tests.board.asking import Asking, opened
from tests.board.deeds import Deeds
from tests.board.device_yard import DeviceYard
from tests.board.keyed import Keyed, keyed
from tests.board.looking import Looker, looking
from tests.cli.running import Command
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.board import access, app
from tokenyard.board.operations import OPERATIONS
from tokenyard.board.pages import request as one
from tokenyard.board.pages import requests as listing
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.scripts import Scripts


@pytest.fixture
def devices(connection: redis.Redis, keys: Keys, scripts: Scripts) -> DeviceYard:
    """A yard whose hosts and workers the test writes."""
    return DeviceYard(connection, keys, scripts)


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, scripts: Scripts) -> PlayedYard:
    """A yard whose leader and workers the test plays."""
    return PlayedYard(connection, keys, scripts)


@pytest.fixture
def bare(connection: redis.Redis, keys: Keys) -> Yard:
    """A yard with nothing in it."""
    return Yard(connection, keys)


@pytest.fixture
def ask(redis_url: str, keys: Keys) -> Iterator[Asking]:
    """A board without keys, asked as a browser or a program would."""
    with opened(redis_url, keys.yard) as asking:
        yield asking


@pytest.fixture
def looker(monkeypatch: pytest.MonkeyPatch, redis_url: str, bare: Yard) -> Iterator[Looker]:
    """An operator at the board, whose role a test may change."""
    with looking(monkeypatch, redis_url, bare) as looker:
        yield looker


@pytest.fixture(scope="module")
def served(valkey_broker: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a board without keys: its own program on a loopback port."""
    words = ("--redis-url", valkey_broker.url, "board", "--port", "0")
    with Command(tmp_path_factory.mktemp("board") / "log", *words) as board:
        found = eventually(lambda: re.search(r"the board is at http://(\S+)/board", board.said))
        yield found[1]
        board.process.terminate()
        assert board.process.wait(60) == 0


@pytest.fixture
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused need not wait."""
    monkeypatch.setattr(access, "_REFUSED_AFTER_S", 0.01)


@pytest.fixture
def door(broker: Server, bare: Yard) -> Iterator[Keyed]:
    """A board that asks for keys."""
    with keyed(broker.url, bare) as made:
        yield made


@pytest.fixture
def deeds(monkeypatch: pytest.MonkeyPatch) -> Deeds:
    """The actions of the board, which are noted and not done."""
    noting = Deeds()
    stand_ins = {name: noting.of(action) for name, action in OPERATIONS.items()}
    monkeypatch.setattr(app, "OPERATIONS", stand_ins)
    return noting


@pytest.fixture
def wide_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests leave ledgers on the server."""
    for name in ("MOST_KEYS", "MOST_KEYS_FOR_ID", "MOST_KEYS_WITH_RESULTS"):
        monkeypatch.setattr(listing, name, 1_000_000)
    monkeypatch.setattr(one, "MOST_KEYS_FOR_ID", 1_000_000)
