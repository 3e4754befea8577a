"""A tenant logs in as a guest, with the rights that `deploy/users.acl` gives guests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tokenyard.admin.tenant_acl import USERS, acl_line, check_guests
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import Keys

FILE = Path(__file__).parents[3] / "deploy" / "users.acl"
LINES = {line.split()[1]: line for line in FILE.read_text().splitlines()}
KEYS = Keys("main")


def test_a_tenant_has_the_rights_of_a_guest() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    given = LINES["guest"].replace(" on ", f" on #{digest} ", 1)
    assert acl_line(KEYS, "guest", "secret") == given
    # as deploy/start-redis.sh derives them from it
    other = given.replace(":guest", ":ann").replace("user guest", "user ann")
    assert acl_line(KEYS, "ann", "secret") == other
    assert acl_line(Keys("nightly"), "ann", "secret") == other.replace("{main}", "{nightly}")


def test_nobody_logs_in_without_a_password() -> None:
    assert acl_line(KEYS, "ann", "").startswith("user ann off resetchannels ")


def test_a_tenant_is_none_of_the_users_of_the_system() -> None:
    assert sorted([*USERS, "guest"]) == sorted(LINES)
    for name in USERS:
        with pytest.raises(InvalidRequest, match="has a user of this name"):
            acl_line(KEYS, name, "secret")


@pytest.mark.parametrize("name", ["http", "http.bob", "anon", "batch_x", "client-x"])
def test_a_tenant_is_no_client_that_the_system_makes(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be a guest"):
        acl_line(KEYS, name, "secret")
    with pytest.raises(InvalidRequest, match="cannot be a guest"):
        check_guests(["ann", name])
    check_guests(["ann"])


@pytest.mark.parametrize("name", ["", "x" * 91, "a b", "a*", "a~b", "a\nuser eve on nopass"])
def test_a_name_that_can_be_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        acl_line(KEYS, name, "secret")


@pytest.mark.parametrize("other", ["ann-b", "a"])
def test_tenants_that_could_read_each_others_answers_are_refused(other: str) -> None:
    name = "ann" if other == "ann-b" else "a-nn"
    with pytest.raises(InvalidRequest, match="rename one"):
        acl_line(KEYS, name, "secret", ["bob", name, other])


def test_tenants_that_only_begin_alike_are_none_of_those() -> None:
    assert acl_line(KEYS, "ann", "secret", ["anna", "ann.b", "ann"])
