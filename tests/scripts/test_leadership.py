"""lead.lua and resign.lua: one coordinator leads, under a new epoch each time."""

from __future__ import annotations

import redis

from tests.support.waiting import eventually
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts

LONG_MS = 60_000


def test_first_comer_leads_for_the_length_of_its_lease(
    scripts: Scripts, connection: redis.Redis, keys: Keys
) -> None:
    token = scripts.lead("ann", LONG_MS)

    assert token == "1:ann"
    assert connection.get(keys.leader) == b"1:ann"
    assert LONG_MS - 5_000 < connection.pttl(keys.leader) <= LONG_MS


def test_during_a_lease_no_other_coordinator_leads(scripts: Scripts) -> None:
    token = scripts.lead("ann", LONG_MS)

    assert scripts.lead("bob", LONG_MS) == ""
    assert scripts.lead("bob", LONG_MS, "0:bob") == ""
    assert scripts.lead("ann", LONG_MS) == "", "another process of the same name has no token"
    assert scripts.lead("ann", LONG_MS, token) == token


def test_leader_extends_its_lease(scripts: Scripts, connection: redis.Redis, keys: Keys) -> None:
    token = scripts.lead("ann", 5_000)

    assert scripts.lead("ann", LONG_MS, token) == token
    assert connection.pttl(keys.leader) > 5_000


def test_after_an_expired_lease_another_leads_under_a_new_epoch(scripts: Scripts) -> None:
    old = scripts.lead("ann", 50)

    new = eventually(lambda: scripts.lead("bob", LONG_MS))

    assert (old, new) == ("1:ann", "2:bob")
    assert scripts.lead("ann", LONG_MS, old) == ""


def test_a_leader_whose_lease_expired_leads_again_with_a_new_token(
    scripts: Scripts, connection: redis.Redis, keys: Keys
) -> None:
    old = scripts.lead("ann", LONG_MS)
    connection.delete(keys.leader)

    assert scripts.lead("ann", LONG_MS, old) == "2:ann"


def test_resigning_ends_the_lease_immediately_and_wakes_the_standby(
    scripts: Scripts, connection: redis.Redis, keys: Keys
) -> None:
    token = scripts.lead("ann", LONG_MS)

    assert scripts.resign(token)
    assert not scripts.resign(token)

    assert [fields for _, fields in connection.xrange(keys.events)] == [{b"event": b"resigned"}]
    assert scripts.lead("bob", LONG_MS) == "2:bob"


def test_former_leader_cannot_end_its_successors_lease(
    scripts: Scripts, connection: redis.Redis, keys: Keys
) -> None:
    old = scripts.lead("ann", LONG_MS)
    scripts.resign(old)
    new = scripts.lead("bob", LONG_MS)

    assert not scripts.resign(old)
    assert not scripts.resign("")
    assert connection.get(keys.leader) == new.encode()
