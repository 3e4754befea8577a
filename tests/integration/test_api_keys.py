"""Keys of the gateway: how operators keep them, and what gateways make of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from tests.integration.operating import Command
from tests.support.api_keys import create_key
from tests.support.builders import random_name
from tests.support.fake_clock import FakeClock
from tests.support.servers import Server
from tests.support.yard import PlayedYard
from tokenyard.ops.keys import list_keys, revoke_key
from tokenyard.protocol.api_keys import ApiKey, decode_key, encode_key, key_digest
from tokenyard.protocol.errors import BadInput, SettingsError
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.keys import Keys, Yard

pytest.importorskip("starlette", reason="the gateway is not installed")

from starlette.datastructures import Headers

from gateway.http import principal as principals
from gateway.http.errors import GatewayError
from gateway.http.principal import Principal, PrincipalLookup
from gateway.queue.yard import YardQueue


@pytest.fixture
def command(command: Command) -> Command:
    return partial(command, "keys")


def test_redis_has_the_digest_of_a_key_and_nothing_else_of_it(yard: PlayedYard) -> None:
    key, key_id = create_key(yard, "research", models=["m"], classes=["low"])
    stored: Any = yard.connection.hgetall(yard.keys.api_keys)
    assert list(stored) == [key_digest(key).encode()]
    assert key.encode() not in b"".join([*stored, *stored.values()])
    (found,) = list_keys(yard).items()
    assert found[0] == key_id
    assert (found[1].tenant, found[1].models, found[1].classes) == ("research", ["m"], ["low"])


def test_a_key_is_revoked_by_its_id_or_by_itself_only(yard: PlayedYard) -> None:
    first, second = (create_key(yard, "research") for _ in range(2))
    for wrong in ("", first[1][:-1], "f" * 12, "ty-unknown", "*"):
        assert not revoke_key(yard, wrong)
    assert revoke_key(yard, first[0])
    assert not revoke_key(yard, first[1])
    assert list(list_keys(yard)) == [second[1]]
    assert revoke_key(yard, second[1])
    assert list_keys(yard) == {}


@pytest.mark.parametrize("tenant", ["", "a/b", "a b", "x" * 91, "a\n", "é"])
def test_a_tenant_that_cannot_name_a_client_is_refused(yard: PlayedYard, tenant: str) -> None:
    with pytest.raises(BadInput):
        create_key(yard, tenant)
    assert not yard.connection.exists(yard.keys.api_keys)


def test_the_command_creates_lists_and_revokes(command: Command) -> None:
    made = json.loads(command("create", "--tenant", "research", "--json").stdout)
    command("create", "--tenant", "nightly", "--models", "a,b", "--classes", "all")
    table = command("list").stdout
    assert made["key"] not in table
    assert re.search(rf"{made['id']}\s+research\s+all\s+all", table)
    assert max(map(len, table.splitlines())) <= 80
    listed = json.loads(command("list", "--json").stdout)
    assert [one["tenant"] for one in listed] == ["research", "nightly"]
    assert (listed[1]["models"], "classes" in listed[1]) == (["a", "b"], False)
    assert command("revoke", made["id"]).exit_code == 0
    assert command("revoke", made["id"]).exit_code == 1
    assert "1 key" in command("list").stdout


def test_the_command_prints_the_key_alone_on_stdout(command: Command) -> None:
    done = command("create", "--tenant", "research")
    assert re.fullmatch(r"ty-[\w-]{43}\n", done.stdout)


@pytest.mark.parametrize(
    ("option", "given", "reason"),
    [
        ("--tenant", "a/b", "--tenant: 'a/b'"),
        ("--classes", "fast", "classes"),
        ("--classes", " , ", "classes: name one or more"),
        ("--models", "", "models: name one or more"),
        ("--name", "x" * 201, "--name: give 200 characters at most"),
    ],
)
def test_mistakes_create_nothing(
    command: Command, yard: PlayedYard, option: str, given: str, reason: str
) -> None:
    done = command("create", "--tenant", "a", option, given)
    assert done.exit_code != 0
    assert "Error" in done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert list_keys(yard) == {}


def test_a_key_that_may_use_nothing_is_listed_as_such(command: Command, yard: PlayedYard) -> None:
    key = ApiKey(tenant="research", models=[], classes=[])
    yard.connection.hset(yard.keys.api_keys, "0" * 64, encode_key(key))
    assert command("list").stdout.split().count("none") == 2


# What gateways make of them


def chosen(principal: Principal, tier: Any) -> str | int:
    """The class of a request, or the status of its refusal."""
    try:
        return principal.choose_class({"service_tier": tier})
    except GatewayError as error:
        return error.status


def looked_up(
    url: str, yard: PlayedYard, test: Callable[[PrincipalLookup], Awaitable[None]]
) -> None:
    async def scenario() -> None:
        queue = YardQueue(url, yard.keys.yard)
        await queue.start()
        try:
            await test(PrincipalLookup(queue, needs_key=True))
        finally:
            await queue.stop()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


async def status_of(lookup: PrincipalLookup, headers: Headers) -> int:
    try:
        await lookup.find(headers)
    except GatewayError as error:
        return error.status
    return 200


def test_a_key_works_by_both_headers_until_it_is_revoked(
    broker: Server, yard: PlayedYard, fake_clock: FakeClock
) -> None:
    key, key_id = create_key(yard, "research")

    async def test(lookup: PrincipalLookup) -> None:
        assert (await lookup.find(bearer(key))).client == "http.research"
        assert (await lookup.find(Headers({"x-api-key": key}))).tenant == "research"
        revoke_key(yard, key_id)
        fake_clock.advance(2 * principals._TRUSTED_S)
        assert await status_of(lookup, bearer(key)) == 401

    looked_up(broker.url, yard, test)


def test_keys_of_another_yard_and_hostile_headers_are_refused(
    broker: Server, yard: PlayedYard
) -> None:
    other, _ = create_key(Yard(yard.connection, Keys(random_name("yard"))), "research")
    broken = "ty-broken"
    yard.connection.hset(yard.keys.api_keys, key_digest(broken), b"\xff{")
    digest = key_digest(create_key(yard, "research")[0])
    hostile = ["", " ", "*", "ty-", "x" * 513, "x" * 100_000, "\xff\xfe", "ty-a\tb", digest, "{}"]

    async def test(lookup: PrincipalLookup) -> None:
        for text in (other, broken, *hostile):
            assert await status_of(lookup, bearer(text)) == 401, text[:80]
            assert await status_of(lookup, Headers({"x-api-key": text})) == 401, text[:80]
        for text in ("Bearer", "Basic YTpi", "bearer", "Bearer  "):
            assert await status_of(lookup, Headers({"authorization": text})) == 401, text
        assert await status_of(lookup, Headers({})) == 401

    looked_up(broker.url, yard, test)


def test_what_is_stored_limits_models_and_classes(broker: Server, yard: PlayedYard) -> None:
    stored = ApiKey(tenant="nightly", models=["m"], classes=["low"])
    yard.connection.hset(yard.keys.api_keys, key_digest("ty-low"), encode_key(stored))

    async def test(lookup: PrincipalLookup) -> None:
        found = await lookup.find(bearer("ty-low"))
        assert (found.may_use("m"), found.may_use("n")) == (True, False)
        assert found.choose_class({}) == "low"
        assert not found.may_go_first

    looked_up(broker.url, yard, test)


@pytest.mark.parametrize(
    ("tier", "expected"),
    [(None, "normal"), ("auto", "normal"), ("default", "normal"), ("flex", "low"),
     ("scale", "normal"), ("standard_only", "normal"),
     ("priority", "high"), ("fast", 400), (1, 400), (["flex"], 400)],
)  # fmt: skip
def test_tiers_are_classes(tier: Any, expected: str | int) -> None:
    assert chosen(Principal(), tier) == expected


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (None, "low"),
        ("auto", "low"),
        ("scale", "low"),
        ("flex", "low"),
        ("default", 403),
        ("priority", 403),
    ],
)
def test_a_key_for_one_class_may_have_no_other(tier: Any, expected: str | int) -> None:
    assert chosen(Principal(tenant="t", classes=["low"]), tier) == expected


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "", "127.example.com", "localhost.example.com"]
)
def test_keys_can_be_off_on_loopback_only(host: str) -> None:
    with pytest.raises(SettingsError, match="keys"):
        GatewaySettings(redis_url="redis://unused", host=host, keys="off")
    assert GatewaySettings(redis_url="redis://unused", host=host).needs_keys


# Roles


def test_a_key_of_before_roles_has_none() -> None:
    key = decode_key(b'{"tenant":"research","created_ms":1}')
    assert (key.tenant, key.role) == ("research", None)


def test_a_gateway_of_before_roles_cannot_take_a_key_without_a_tenant_for_one() -> None:
    """It asked for the field, and would have served it as nobody's."""
    assert b"tenant" not in encode_key(ApiKey(role="admin"))
    assert b"role" not in encode_key(ApiKey(tenant="research"))


def test_a_key_opens_something(yard: PlayedYard) -> None:
    with pytest.raises(BadInput, match="give a tenant, a role, or both"):
        create_key(yard)
    create_key(yard, role="viewer")
    create_key(yard, "research", role="admin")
    found = [(key.tenant, key.role) for key in list_keys(yard).values()]
    assert sorted(found) == [("", "viewer"), ("research", "admin")]


def test_the_api_refuses_a_key_without_a_tenant(broker: Server, yard: PlayedYard) -> None:
    key, _ = create_key(yard, role="admin")
    both, _ = create_key(yard, "research", role="viewer")
    empty = "ty-empty"
    yard.connection.hset(yard.keys.api_keys, key_digest(empty), b"{}")

    async def test(lookup: PrincipalLookup) -> None:
        assert (await lookup.find(bearer(both))).client == "http.research"
        for one in (key, empty):
            with pytest.raises(GatewayError, match="opens the board only") as refused:
                await lookup.find(bearer(one))
            assert refused.value.status == 403

    looked_up(broker.url, yard, test)


def test_the_command_gives_roles_and_shows_them(command: Command) -> None:
    made = json.loads(command("create", "--role", "operator", "--json").stdout)
    assert (made["tenant"], made["role"]) == ("", "operator")
    done = command("create", "--tenant", "research", "--role", "viewer", "--name", "a wall")
    assert "of research, with the role viewer" in done.stderr
    table = command("list").stdout
    assert re.search(rf"{made['id']}\s+-\s+operator", table)
    assert max(map(len, table.splitlines())) <= 80
    assert [one.get("role") for one in json.loads(command("list", "--json").stdout)] == [
        "operator",
        "viewer",
    ]
    assert command("create", "--role", "owner").exit_code == 2
    assert "give a tenant, a role, or both" in command("create").stderr
