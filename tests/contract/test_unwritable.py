"""Errors of a client whose broker answers but takes no writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.conftest import SERVERS
from tests.contract.conftest import WAIT_S, NewClient
from tests.contract.stand_in import StandIn
from tests.support.fake_clock import FakeClock
from tests.support.unwritable import CODES, Ailing, Ailment
from tokenyard import BrokerNotWritable, NoCoordinator
from tokenyard.protocol.keys import Keys

AILMENTS = get_args(Ailment)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ailing]:
    started = Ailing(request.param, tmp_path)
    started.start()
    yield started
    started.kill()


@pytest.fixture
def stand_in(server: Ailing, keys: Keys) -> Iterator[StandIn]:
    with StandIn.at(server.url, keys) as somebody:
        yield somebody


@pytest.mark.parametrize("ailment", AILMENTS)
def test_an_unwritable_yard_without_a_leader_names_the_broker(
    server: Ailing, new_client_at: NewClient, ailment: Ailment, fake_clock: FakeClock
) -> None:
    # Given a server that takes no writes, and therefore no leader
    server.fall_ill(ailment)

    with pytest.raises(BrokerNotWritable) as caught:
        new_client_at(server.url).start()

    assert caught.value.code == CODES[ailment]
    assert server.url in str(caught.value)

    # If the server recovers, I expect the usual error.
    server.recover(ailment)
    with pytest.raises(NoCoordinator):
        new_client_at(server.url).start()


@pytest.mark.parametrize("ailment", AILMENTS)
def test_a_request_is_refused_with_the_reason(
    server: Ailing, stand_in: StandIn, new_client_at: NewClient, ailment: Ailment
) -> None:
    client = new_client_at(server.url)
    client.start()
    server.fall_ill(ailment)

    with pytest.raises(BrokerNotWritable) as caught:
        client.submit("abc", id="q1")

    assert caught.value.code == CODES[ailment]
    server.recover(ailment)
    client.submit("abc", id="q1")
    assert stand_in.dispatch() == 1


@pytest.mark.parametrize("ailment", AILMENTS)
def test_map_times_out_with_the_reason(
    server: Ailing,
    stand_in: StandIn,
    new_client_at: NewClient,
    ailment: Ailment,
    fake_clock: FakeClock,
) -> None:
    client = new_client_at(server.url)
    client.start()
    server.fall_ill(ailment)

    def items() -> Iterator[str]:
        yield "abc"
        fake_clock.advance(WAIT_S)
        yield from itertools.repeat("abc")

    with pytest.raises(BrokerNotWritable) as caught:
        list(client.map(items(), window=3))

    assert caught.value.code == CODES[ailment]


def test_map_gives_the_reason_for_missing_results(
    server: Ailing, stand_in: StandIn, new_client_at: NewClient, fake_clock: FakeClock
) -> None:
    client = new_client_at(server.url)
    client.start()

    def items() -> Iterator[str]:
        # Given requests accepted before the disk was full
        yield "abc"
        fake_clock.advance(1.0)  # so it does not wait for more
        yield "def"
        assert stand_in.dispatch() == 2
        server.fall_ill("disk")
        fake_clock.advance(WAIT_S)

    with pytest.raises(BrokerNotWritable):
        list(client.map(items()))
