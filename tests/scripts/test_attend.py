"""attend.lua and the part of submit.lua that watches clients."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.yard import PlayedYard, requests
from tokenyard.scripts.client import CLIENT_LEASE_MS, attend


def submit(yard: PlayedYard, *names: str) -> None:
    wanted = [make_request(name, client="ann") for name in names]
    yard.scripts.submit("normal", wanted, watched="ann")


def attached(yard: PlayedYard) -> set[str]:
    return {name.decode() for name in yard.connection.smembers(yard.keys.attached("ann"))}


def lease_ms(yard: PlayedYard) -> int:
    """The client's remaining lease in ms, approximately."""
    return int(yard.connection.zscore(yard.keys.clients, "ann") or 0) - yard.now_ms


def test_submitting_attaches_a_request_to_its_clients_lease(yard: PlayedYard) -> None:
    submit(yard, "a", "b")

    assert attached(yard) == {"a", "b"}
    assert lease_ms(yard) == pytest.approx(CLIENT_LEASE_MS, abs=5000)


def test_clients_are_watched_only_on_request(yard: PlayedYard) -> None:
    yard.scripts.submit("normal", requests(2))

    assert not yard.connection.exists(yard.keys.clients)


def test_ended_requests_are_detached_and_the_lease_is_renewed(yard: PlayedYard) -> None:
    submit(yard, "a", "b")
    yard.connection.zadd(yard.keys.clients, {"ann": 1})

    assert yard.scripts.call(attend(yard.keys, "ann", ["a"])) == 1

    assert attached(yard) == {"b"}
    assert lease_ms(yard) == pytest.approx(CLIENT_LEASE_MS, abs=5000)


def test_a_client_without_requests_is_not_watched(yard: PlayedYard) -> None:
    submit(yard, "a")

    assert yard.scripts.call(attend(yard.keys, "ann", ["a", "unheard of"])) == 0

    assert not yard.connection.exists(yard.keys.clients, yard.keys.attached("ann"))
    assert yard.scripts.call(attend(yard.keys, "ann", [])) == 0, "again does no harm"


def test_a_client_that_leaves_is_listed_as_gone(yard: PlayedYard) -> None:
    submit(yard, "a", "b")
    assert yard.scripts.watch_clients(10, now_ms=yard.now_ms) == []

    assert yard.scripts.call(attend(yard.keys, "ann", ["a"], lease_ms=0)) == 1

    assert yard.scripts.watch_clients(10, now_ms=yard.now_ms) == [b"ann"]
    assert attached(yard) == {"b"}


def test_an_ended_request_is_not_attached_again(yard: PlayedYard) -> None:
    submit(yard, "a")
    yard.scripts.cancel("ann", "a", "for a test")
    yard.scripts.call(attend(yard.keys, "ann", ["a"]))

    submit(yard, "a")

    assert attached(yard) == set()
