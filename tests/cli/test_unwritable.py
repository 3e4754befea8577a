"""Messages of the commands about a broker that answers but takes no writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import redis

from coordinator.coordinator import Coordinator
from tests.cli.running import Ask
from tests.conftest import SERVERS
from tests.support.builders import make_request, random_name
from tests.support.fake_clock import FakeClock
from tests.support.lanes import running
from tests.support.unwritable import CODES, Ailing, Ailment
from tests.support.waiting import eventually
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.scripts import Scripts


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ailing]:
    folder = tmp_path / "server"
    folder.mkdir()
    started = Ailing(request.param, folder)
    started.start()
    yield started
    started.kill()


@pytest.fixture(params=get_args(Ailment))
def ailment(request: pytest.FixtureRequest) -> Ailment:
    ailment: Ailment = request.param
    return ailment


@pytest.fixture
def ask(server: Ailing, ailment: Ailment, invoke: Ask, fake_clock: FakeClock) -> Ask:
    """A function that runs a command on the server while it takes no writes."""
    yard = random_name("yard")
    with redis.Redis.from_url(server.url) as connection:
        scripts = Scripts(Yard(connection, Keys(yard)))
        scripts.submit("normal", [make_request("q1", client="ann")])
    server.fall_ill(ailment)
    return lambda *words: invoke("--redis-url", server.url, "--yard", yard, *words)


def flat(text: str) -> str:
    """Join the lines of a text."""
    return " ".join(text.split())


COMMANDS = (
    ("submit", "--timeout", "60", "1+1="),
    ("info",),
    ("info", "--interval", "0.1", "--count", "1"),
    ("top", "--once", "--interval", "0.1"),
)


def test_an_unwritable_broker_is_no_missing_leader(ask: Ask, ailment: Ailment) -> None:
    for words in COMMANDS:
        done = ask(*words)

        said = flat(done.output)
        assert done.exit_code == Exit.UNAVAILABLE, (words, said)
        assert f"({CODES[ailment]})" in said, words
        assert "no coordinator leads" not in said, words
        assert "nothing is dispatched until a coordinator runs" not in said, words

    view = json.loads(ask("info", "--json").stdout)
    assert view["broker_error"].endswith(f"({CODES[ailment]})")
    assert view["leader"] is None
    story = flat(ask("explain", "--client", "ann", "q1").output)
    assert f"no coordinator can lead: the broker {view['broker_error']}" in story


@pytest.mark.parametrize("ailment", ["disk", "replica"], indirect=True)
def test_a_command_that_writes_names_the_fault(ask: Ask, ailment: Ailment) -> None:
    done = ask("cancel", "--client", "ann", "q1")

    assert done.exit_code == Exit.UNAVAILABLE
    assert f"({CODES[ailment]})" in flat(done.output)


def test_the_doctor_reports_an_unwritable_broker(ask: Ask, ailment: Ailment) -> None:
    done = ask("doctor", "--json")

    assert done.exit_code == Exit.FAILED, done.output
    found = {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert found["writes"]["verdict"] == "fault"
    assert f"({CODES[ailment]})" in found["writes"]["todo"]
    assert "Repair the broker first" in found["coordinator"]["todo"]


@pytest.mark.long
def test_coordinator_limits_the_rate_of_its_log(
    server: Ailing, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a leader whose server falls ill
    caplog.set_level(logging.INFO, "tokenyard.coordinator")
    keys = Keys(random_name("yard"))
    settings = CoordinatorSettings(redis_url=server.url, yard=keys.yard, lease_ms=500, block_ms=50)
    coordinator = Coordinator(settings)
    faults: list[None] = []
    forget = coordinator._forget_connection

    def count_and_forget() -> None:
        faults.append(None)
        forget()  # so each turn begins with a write

    monkeypatch.setattr(coordinator, "_forget_connection", count_and_forget)
    with redis.Redis.from_url(server.url) as connection, running(coordinator):
        eventually(lambda: connection.get(keys.leader))
        server.fall_ill("disk")
        eventually(lambda: not connection.get(keys.leader))
        eventually(lambda: len(faults) > 5, timeout_s=60.0)

        # If the server recovers, I expect the coordinator to lead again,
        server.recover("disk")
        eventually(lambda: connection.get(keys.leader))
        eventually(lambda: "works again" in caplog.text)

    # and a single warning for all attempts. A busy machine may have cost it the lead at any time.
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert ["MISCONF" in said for said in warnings if "lost the lead" not in said] == [True]
