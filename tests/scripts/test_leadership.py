"""lead.lua and resign.lua: one coordinator leads, and each reign has an epoch of its own."""

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


def test_while_one_leads_no_other_does(scripts: Scripts) -> None:
    token = scripts.lead("ann", LONG_MS)

    assert scripts.lead("bob", LONG_MS) == ""
    assert scripts.lead("bob", LONG_MS, "0:bob") == ""
    assert scripts.lead("ann", LONG_MS) == "", "another process of the same name has no token"
    assert scripts.lead("ann", LONG_MS, token) == token


def test_leader_extends_its_lease(scripts: Scripts, connection: redis.Redis, keys: Keys) -> None:
    token = scripts.lead("ann", 5_000)

    assert scripts.lead("ann", LONG_MS, token) == token
    assert connection.pttl(keys.leader) > 5_000


def test_lease_that_ends_opens_the_lead_under_a_new_epoch(scripts: Scripts) -> None:
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


def test_resigning_opens_the_lead_at_once_and_wakes_the_standby(
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
