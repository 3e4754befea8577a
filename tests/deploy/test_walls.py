"""The attacks by users of `deploy/users.acl` that docs/deploy.md lists as refused."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import redis

from tests.deploy.conftest import GUESTS_YARD
from tests.deploy.rights import is_refused
from tests.support.brokers import DEPLOY, GuardedServer
from tokenyard.protocol.keys import Keys

YARD = Keys(GUESTS_YARD)
OTHER = Keys("some-other-yard")
LOOP = "while true do end"
BIG = "x" * 1000

#: Keys of a client's own requests that it may not delete.
KEPT = (YARD.intake("normal"), YARD.ledger("client", "q1"), YARD.clients)

#: Refused to clients and guests, under the words of the table in docs/deploy.md.
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
        ("XREAD", "STREAMS", YARD.inbox("bob"), 0),
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
#: Allowed to clients, who are trusted, and refused to guests.
TRUSTED: dict[str, list[tuple[object, ...]]] = {
    "scripts of others": [("EVALSHA", "0" * 40, 0), ("FCALL", "f", 0)],
    "names in `clients`": [("ZADD", YARD.clients, 1, b"\xff\xfe")],
    "the highest id onto `cancelling`": [
        ("XADD", YARD.cancelling, "18446744073709551615-18446744073709551615", "client", "x"),
        ("SADD", YARD.cancels("guest"), "q1"),
    ],
    "the highest id onto `arrivals`": [
        ("XADD", YARD.arrivals, "18446744073709551615-18446744073709551615", "event", "x"),
    ],
    "ledgers of 20 MB": [("HSET", YARD.ledger("guest", "q1"), "state", "waiting", "x", BIG)],
    "entries of the intakes": [
        ("XADD", YARD.intake("normal"), "*", "id", "q1", "client", "bob"),
        ("XADD", YARD.intake("high"), "*", "id", "q1"),
    ],
    "counters": [("HSET", YARD.tally, "queued_tokens", "garbage")],
    "attached": [("SADD", YARD.attached("guest"), "q1")],
}
#: Attacks that only guests can try.
OF_GUESTS: dict[str, list[tuple[object, ...]]] = {
    "inboxes of others": [
        ("XADD", YARD.inbox("eve"), "*", "id", "q1"),
        ("XADD", OTHER.inbox("guest"), "*", "id", "q1"),
        ("XADD", YARD.inbox("guest-1"), "*", "id", "q1"),
        ("SELECT", 1),
    ],
    "its own inbox, but by XADD": [
        ("XREAD", "STREAMS", YARD.inbox("guest"), 0),
        ("XTRIM", YARD.inbox("guest"), "MAXLEN", 0),
        ("DEL", YARD.inbox("guest")),
        ("SET", YARD.inbox("guest"), "x"),
        ("XGROUP", "CREATE", YARD.inbox("guest"), "mine", 0),
    ],
    "its own replies, but to read and to trim": [
        ("XADD", YARD.replies("guest"), "*", "frame", "x"),
        ("XADD", YARD.reply("guest", "q1"), "*", "event", "result"),
        ("DEL", YARD.ledger("guest", "q1")),
        ("EXPIRE", YARD.ledger("guest", "q1"), 1),
        ("APPEND", YARD.tokens("guest", "q1"), "x"),
    ],
    "workers and hosts": [
        ("HGETALL", YARD.workers),
        ("ZRANGE", YARD.leases, 0, -1),
        ("HGETALL", YARD.hosts),
        ("XLEN", YARD.intake("normal")),
        ("HGETALL", YARD.tally),
    ],
    "another tenant's things": [
        # submitting
        *(
            ("XADD", YARD.intake(f"{one}:eve"), "*", "id", "q1")
            for one in ("high", "normal", "low")
        ),
        ("XADD", YARD.intake("normal"), "*", "id", "q1", "tenant", "eve"),
        ("XADD", YARD.intake("normal:guest"), "*", "id", "q1"),
        ("XADD", YARD.inbox("eve"), "*", "id", "q1", "client", "eve"),
        ("HSET", YARD.ledger("eve", "q1"), "state", "waiting", "sid", "normal:eve/1-0"),
        ("SADD", YARD.attached("eve"), "q1"),
        # reading
        ("XRANGE", YARD.intake("normal:eve"), "-", "+"),
        ("XREAD", "STREAMS", YARD.intake("low:eve"), 0),
        ("XLEN", YARD.intake("normal:eve")),
        ("HGETALL", YARD.ledger("eve", "q1")),
        ("HMGET", YARD.ledger("eve-1", "q1"), "result"),
        ("GET", YARD.tokens("eve", "q1")),
        ("XREAD", "STREAMS", YARD.reply("eve", "q1"), 0),
        ("XREAD", "STREAMS", YARD.replies("eve-1"), 0),
        ("XRANGE", YARD.inbox("eve"), "-", "+"),
        *(
            attempt
            for client in ("http.eve", "http", "anon", "batch_1", "client-1")
            for attempt in (
                ("HGETALL", YARD.ledger(client, "q1")),
                ("GET", YARD.tokens(client, "q1")),
                ("XREAD", "STREAMS", YARD.reply(client, "q1"), 0),
                ("XREAD", "STREAMS", YARD.replies(client), 0),
                ("XADD", YARD.inbox(client), "*", "id", "q1", "client", client),
            )
        ),
        ("HGETALL", YARD.tenant("eve")),
        ("HGETALL", YARD.usage("eve")),
        ("HGETALL", YARD.tenants),
        ("ZRANGE", YARD.line, 0, -1),
        ("ZSCORE", YARD.service, "eve"),
        # cancelling
        ("XDEL", YARD.intake("normal:eve"), "1-0"),
        ("XTRIM", YARD.intake("normal:eve"), "MAXLEN", 0),
        ("DEL", YARD.intake("normal:eve")),
        ("EXPIRE", YARD.intake("normal:eve"), 1),
        ("SADD", YARD.cancels("eve"), "q1"),
        ("XADD", YARD.cancelling, "*", "client", "eve"),
        ("HSET", YARD.ledger("eve", "q1"), "state", "cancelled"),
        ("XTRIM", YARD.replies("eve"), "MAXLEN", 0),
        ("ZADD", YARD.clients, 1, "eve"),
        # counting and spending, also its own
        ("HINCRBY", YARD.tenant("eve"), "running", 100),
        ("HSET", YARD.tenant("eve"), "m0", "1 1000000"),
        ("HSET", YARD.tenant("guest"), "waiting", 0),
        ("DEL", YARD.tenant("guest")),
        ("ZADD", YARD.service, 0, "guest"),
        ("ZINCRBY", YARD.service, 1_000_000, "eve"),
        ("ZADD", YARD.line, 0, "guest"),
        ("ZREM", YARD.line, "eve"),
        ("HSET", YARD.tenants, "guest", '{"weight":1000}'),
        ("HDEL", YARD.tenants, "eve"),
        ("HINCRBY", YARD.usage("eve"), "20260101 sim in", 1),
        ("DEL", YARD.usage("guest")),
        ("HSET", YARD.tally, "tenants_waiting:normal", 0),
    ],
}
CASES = [
    *(("client", what) for what in REFUSED),
    *(("guest", what) for what in REFUSED | TRUSTED | OF_GUESTS),
]


@pytest.mark.parametrize(("user", "what"), CASES)
def test_each_attack_is_refused(guarded: GuardedServer, user: str, what: str) -> None:
    commands = (REFUSED | TRUSTED | OF_GUESTS)[what]
    with redis.Redis.from_url(guarded.url_of(user)) as connection:
        assert [one for one in commands if not is_refused(connection, *one)] == []


#: Names of tenants whose users would be clients that the system makes.
OF_THE_SYSTEM = ("http.eve", "http", "anon", "gateway", "batch", "batch_1", "client", "client-1")


@pytest.mark.parametrize("name", OF_THE_SYSTEM)
def test_no_guest_of_a_new_server_is_named_so(name: str, tmp_path: Path) -> None:
    variables = {"PATH": os.environ["PATH"], "FOLDER": str(tmp_path), "SERVER": "true"}
    for guests, code in ((f"ann,{name}", 2), ("ann,https", 0)):
        done = subprocess.run(
            ["sh", str(DEPLOY / "start-redis.sh")],
            env=variables | {"GUESTS": guests},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, name in done.stderr) == (code, code == 2), done.stderr


def test_a_tenant_has_at_least_thirty_ways_barred() -> None:
    assert len(OF_GUESTS["another tenant's things"]) >= 30


@pytest.mark.parametrize("user", ["client", "guest"])
def test_debug_is_refused(guarded: GuardedServer, user: str) -> None:
    with (
        redis.Redis.from_url(guarded.url_of(user)) as connection,
        pytest.raises(redis.ResponseError, match=r"not allowed|no permissions"),
    ):
        connection.execute_command("DEBUG", "SLEEP", 10)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("what", TRUSTED)
def test_a_trusted_client_has_rights_that_guests_lack(guarded: GuardedServer, what: str) -> None:
    """Keep the table of what trust means true; other tests cover the consequences."""
    with redis.Redis.from_url(guarded.url_of("client")) as connection:
        for command in TRUSTED[what]:
            own = tuple(
                word.replace(":guest", ":client") if isinstance(word, str) else word
                for word in command
            )
            if own[0] == "FCALL":
                assert is_refused(connection, *own)
                continue
            # It may call loaded scripts.
            with contextlib.suppress(redis.exceptions.NoScriptError):
                assert not is_refused(connection, *own), own
    with redis.Redis.from_url(guarded.url_of("default")) as keeper:
        keeper.flushall()


def test_the_table_lists_each_attack() -> None:
    """docs/deploy.md names each kind of attack of this module, and the tests that it names
    exist."""
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    table = page.partition("### What a hostile client can do")[2].partition("\n### ")[0]
    assert [what for what in REFUSED | TRUSTED | OF_GUESTS if what not in table] == []
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", table)
    assert named
    assert [name for name in named if f"def {name}(" not in tests] == []
