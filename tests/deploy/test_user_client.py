"""What the user `client` of `deploy/users.acl` may do and is refused, as docs/deploy.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.deploy.rights import is_refused
from tests.support.brokers import GuardedServer
from tests.support.builders import random_name
from tokenyard.protocol.keys import Keys

YARD = Keys(random_name("yard"))
LOOP = "while true do end"
HIGHEST = "18446744073709551615-18446744073709551615"

#: Keys of a client's own requests that it may not delete.
KEPT = (YARD.intake("normal"), YARD.ledger("client", "q1"), YARD.clients)

#: Refused, under the words of docs/deploy.md.
REFUSED: dict[str, list[tuple[object, ...]]] = {
    "a Lua loop": [
        ("SCRIPT", "LOAD", LOOP),
        ("EVAL", LOOP, 0),
        ("EVAL_RO", LOOP, 0),
        ("FUNCTION", "LOAD", f"#!lua name=x\nredis.register_function('f', function() {LOOP} end)"),
        ("SCRIPT", "FLUSH"),
    ],
    "`info`": [
        ("HSET", YARD.info, "epoch", "garbage"),
        ("HSET", YARD.info, "rate", "abc"),
        ("HSET", YARD.info, "protocol", 9),
        ("HSET", YARD.info, "max_request_bytes", 1),
        ("HINCRBY", YARD.info, "epoch", 1),
        ("DEL", YARD.info),
        ("EXPIRE", YARD.info, 1),
    ],
    "the whole server": [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("SCAN", 0),
        ("CONFIG", "GET", "*"),
        ("CONFIG", "SET", "maxmemory", 1),
        ("SHUTDOWN",),
        ("ACL", "LIST"),
        ("ACL", "SETUSER", "me", "on"),
        ("REPLICAOF", "NO", "ONE"),
        ("SAVE",),
        ("SWAPDB", 0, 1),
        ("MODULE", "LIST"),
        ("MEMORY", "USAGE", YARD.info),
        ("CLUSTER", "RESET"),
        ("MIGRATE", "127.0.0.1", 1, YARD.info, 0, 1),
        ("OBJECT", "ENCODING", YARD.info),
    ],
    "other connections": [
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("CLIENT", "LIST"),
        ("CLIENT", "PAUSE", 10_000),
        ("CLIENT", "UNBLOCK", 1),
        ("CLIENT", "NO-EVICT", "on"),
    ],
    "listening": [
        ("MONITOR",),
        ("SUBSCRIBE", "a"),
        ("PSUBSCRIBE", "*"),
        ("PUBLISH", "a", "b"),
        ("CLIENT", "TRACKING", "ON", "BCAST"),
    ],
    "prompts and answers of others": [
        ("XREAD", "STREAMS", YARD.replies("bob"), 0),
        ("XREAD", "STREAMS", YARD.reply("bob", "q1"), 0),
        ("HGETALL", YARD.ledger("bob", "q1")),
        ("GET", YARD.tokens("bob", "q1")),
        ("XRANGE", YARD.intake("normal"), "-", "+"),
        ("XREAD", "STREAMS", YARD.intake("normal"), 0),
        ("XRANGE", YARD.lane("w.1"), "-", "+"),
        ("XRANGE", YARD.dead, "-", "+"),
        ("COPY", YARD.ledger("bob", "q1"), YARD.ledger("client", "q1")),
        ("DUMP", YARD.ledger("bob", "q1")),
        ("HGETALL", YARD.ledger("http.bob", "q1")),
        ("XREAD", "STREAMS", YARD.reply("http", "q1"), 0),
    ],
    "what gateways keep": [
        ("HGETALL", YARD.api_keys),
        ("HGET", YARD.api_keys, "digest"),
        ("HSET", YARD.api_keys, "digest", "{}"),
        ("HDEL", YARD.api_keys, "digest"),
        ("GET", YARD.http_record("http", "q1")),
        ("SET", YARD.http_record("http.bob", "q1"), "x"),
        ("DEL", YARD.http_record("http", "q1")),
        ("GET", YARD.response("http.bob", "q1")),
        ("SET", YARD.response("http", "q1"), "x"),
        ("DEL", YARD.response("http", "q1")),
        ("XADD", YARD.reply("gateway", "g1"), "*", "w", 1),
    ],
    "what belongs to the system": [
        ("SET", YARD.leader, "1:me"),
        ("DEL", YARD.leader),
        ("HSET", YARD.workers, "w.1", "{}"),
        ("ZADD", YARD.leases, 1, "w.1"),
        ("XADD", YARD.lane("w.1"), "*", "id", "q1"),
        ("XADD", YARD.intake("retry"), "*", "id", "q1"),
        ("XADD", YARD.control, "*", "signal", "{}"),
        ("XADD", YARD.events, "*", "event", "joined"),
        ("HSET", YARD.desired, "all", "{}"),
        ("XTRIM", YARD.intake("normal"), "MAXLEN", 0),
        ("XDEL", YARD.intake("normal"), "1-0"),
        ("XGROUP", "DESTROY", YARD.intake("normal"), "coordinator"),
        ("XGROUP", "CREATE", YARD.intake("normal"), "mine", "0"),
        ("XADD", YARD.reply("client", "q1"), "*", "event", "result"),
        ("XADD", YARD.dead, "*", "id", "q1"),
        *((verb, key, *rest) for key in KEPT for verb, *rest in (("DEL",), ("EXPIRE", 1))),
        ("DEL", YARD.dead),
        ("RENAME", YARD.intake("normal"), YARD.intake("low")),
    ],
}
#: What it may do though it can harm others; other tests cover the consequences.
ALLOWED: dict[str, list[tuple[object, ...]]] = {
    "entries of the intakes": [
        ("XADD", YARD.intake("normal"), "*", "id", "q1", "client", "bob"),
        ("XADD", YARD.intake("high"), "*", "id", "q1"),
    ],
    "ledgers of 20 MB": [("HSET", YARD.ledger("client", "q1"), "state", "waiting", "x", "x")],
    "counters": [("HSET", YARD.tally, "queued_tokens", "garbage")],
    "names in `clients`": [("ZADD", YARD.clients, 1, b"\xff\xfe")],
    "attached": [("SADD", YARD.attached("client"), "q1")],
    "the highest id onto `cancelling`": [
        ("XADD", YARD.cancelling, HIGHEST, "client", "x"),
        ("SADD", YARD.cancels("client"), "q1"),
    ],
    "the highest id onto `arrivals`": [("XADD", YARD.arrivals, HIGHEST, "event", "x")],
}


@pytest.mark.parametrize("what", REFUSED)
def test_each_attack_is_refused(guarded: GuardedServer, what: str) -> None:
    with redis.Redis.from_url(guarded.url_of("client")) as connection:
        assert [one for one in REFUSED[what] if not is_refused(connection, *one)] == []


def test_debug_is_refused(guarded: GuardedServer) -> None:
    with (
        redis.Redis.from_url(guarded.url_of("client")) as connection,
        pytest.raises(redis.ResponseError, match=r"not allowed|no permissions"),
    ):
        connection.execute_command("DEBUG", "SLEEP", 10)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("what", ALLOWED)
def test_a_client_is_trusted_with_the_rest(guarded: GuardedServer, what: str) -> None:
    with redis.Redis.from_url(guarded.url_of("client")) as connection:
        assert [one for one in ALLOWED[what] if is_refused(connection, *one)] == []


def test_the_page_lists_all_of_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    told = page.partition("### What a hostile client can do")[2].partition("\n### ")[0]
    assert [what for what in REFUSED | ALLOWED if what not in told] == []
