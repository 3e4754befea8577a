"""request_cancel.lua: a client without the right to cancel asks the leader."""

from __future__ import annotations

import pytest

from tests.support.yard import PlayedYard
from tokenyard.scripts import client as client_scripts
from tokenyard.scripts.client import request_cancel


def ask(yard: PlayedYard, request_id: str, client: str = "ann") -> bool:
    return yard.scripts.call(request_cancel(yard.keys, client, request_id))


def cancels(yard: PlayedYard) -> set[bytes]:
    return set(yard.connection.smembers(yard.keys.cancels("ann")))


def cancelling(yard: PlayedYard) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in yard.connection.xrange(yard.keys.cancelling)]


def test_a_requested_cancel_is_kept_and_wakes_the_leader(yard: PlayedYard) -> None:
    assert ask(yard, "a/b")

    assert cancels(yard) == {b"a/b"}
    assert cancelling(yard) == [{b"client": b"ann"}]
    assert 0 < yard.ttl_s(yard.keys.cancels("ann")) <= client_scripts.CANCEL_TTL_S


def test_each_cancel_is_kept_once_for_its_client_and_wakes_again(yard: PlayedYard) -> None:
    for client in ("ann", "bob", "ann"):
        ask(yard, "a", client)

    assert cancels(yard) == {b"a"}
    assert [one[b"client"] for one in cancelling(yard)] == [b"ann", b"bob", b"ann"]


def test_requested_cancels_of_a_client_are_bounded(
    yard: PlayedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_scripts, "MOST_CANCELS", 2)

    answers = [ask(yard, name) for name in ("a", "b", "c", "a")]

    assert answers == [True, True, False, True]
    assert cancels(yard) == {b"a", b"b"}
