"""protocol.keys: all keys of a yard share one hash tag, and no name can forge another's key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from tokenyard.protocol.keys import INTAKE_CLASSES, PRIORITY_CLASSES, Keys, is_name


def test_keys_are_those_of_the_protocol() -> None:
    keys = Keys("main")
    rest_of = {
        keys.intake("normal"): "intake:normal",
        keys.intake("retry"): "intake:retry",
        keys.lane("w.1"): "lane:w.1",
        keys.ledger("anon", "q1"): "request:anon/q1",
        keys.tokens("anon", "q1"): "tokens:anon/q1",
        keys.reply("anon", "q1"): "reply:anon/q1",
        keys.replies("anon"): "replies:anon",
        keys.workers: "workers",
        keys.leases: "leases",
        keys.leader: "leader",
        keys.events: "events",
        keys.capacity: "capacity",
        keys.dead: "dead",
        keys.info: "info",
    }
    assert list(rest_of) == [f"tokenyard:{{main}}:{rest}" for rest in rest_of.values()]


def test_clients_may_write_all_intakes_but_one() -> None:
    assert set(INTAKE_CLASSES) - set(PRIORITY_CLASSES) == {"retry"}


@pytest.mark.parametrize("name", ["a", "A-z_0.9:@", "x" * 100])
def test_names(name: str) -> None:
    assert is_name(name)
    assert Keys(name).yard == name


@pytest.mark.parametrize("name", ["", "x" * 101, "a b", "a/b", "{a}", "a\n", "é", "a\0"])
def test_invalid_names(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="yard"):
        Keys(name)


@given(st.text(min_size=1, max_size=20))
def test_every_key_lies_in_the_slot_of_its_yard(request_id: str) -> None:
    keys = Keys("main")

    slot = key_slot(keys.info.encode())

    for key in (keys.ledger("anon", request_id), keys.reply("anon", request_id), keys.leader):
        assert key_slot(key.encode()) == slot


CLIENTS = st.text("ab.:@-_", min_size=1, max_size=4)
REQUEST_IDS = st.text("ab/:{}.", min_size=1, max_size=4)


@given(st.tuples(CLIENTS, REQUEST_IDS), st.tuples(CLIENTS, REQUEST_IDS))
def test_two_requests_never_share_a_key(one: tuple[str, str], two: tuple[str, str]) -> None:
    keys = Keys("main")
    others = {keys.ledger(*two), keys.tokens(*two), keys.reply(*two), keys.replies(two[0])}
    if one != two:
        assert keys.ledger(*one) not in others
        assert keys.tokens(*one) not in others
        assert keys.reply(*one) not in others
