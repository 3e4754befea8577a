"""The user `gateway` can do what gateways do on the broker, and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis

from tests.deploy.day import Day
from tests.deploy.rights import denied, granted, in_scripts, is_refused, monitored
from tests.docs.pages import page, section
from tests.support.brokers import DEPLOY, GuardedServer
from tests.support.builders import make_request, random_name
from tokenyard.admin.api_keys import create_key, list_keys, revoke_key
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Request, SamplingParams

pytest.importorskip("vllm", reason="the gateway's front end is vLLM's")

from starlette.datastructures import Headers

from gateway.announcements import OwnRules
from gateway.batches.asked import read_batch
from gateway.batches.files import FileStore, new_id
from gateway.batches.folder import FolderStorage
from gateway.batches.jobs import BatchJobs
from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError
from gateway.http.principal import Principal, PrincipalLookup
from gateway.http.records import Records, durable_id
from gateway.models import ModelWatch
from gateway.queue.yard import YardQueue
from gateway.responses.store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    from gateway.frontend.models import FrontEnds

USERS_FILE = DEPLOY / "users.acl"
SCRIPTS = {"submit", "cancel"}
CLIENT = "http.research"


@asynccontextmanager
async def yard_queue(day: Day) -> AsyncIterator[YardQueue]:
    queue = YardQueue(day.url("gateway"), day.keys.yard)
    await queue.start()
    try:
        yield queue
    finally:
        await queue.stop()


def asked(client: str, max_tokens: int = 5) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return make_request(client=client, params=params, model="sim", stream=True)


async def replies(queue: YardQueue, request: Request) -> list[Reply]:
    context = RequestContext(durable_id(request.client, None), request.client, 0.0)
    async with aclosing(queue.ask(request, context)) as found:
        return [one async for one in found]


async def asks_and_cancels(queue: YardQueue) -> None:
    """Ask for a whole answer, leave another one, and cancel a third that waits."""
    for client in ("http", CLIENT):
        assert (await replies(queue, asked(client)))[-1].event == "result"
    left = asked(CLIENT, 2000)
    context = RequestContext(durable_id(CLIENT, None), CLIENT, 0.0)
    async with aclosing(queue.ask(left, context)) as found:
        async for _ in found:
            break
    state = queue.keys.ledger(CLIENT, left.id)
    while await queue.connection.hget(state, "state") != b"cancelled":  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def keeps(queue: YardQueue) -> None:
    """Keep a record and a response, and forget the response."""
    records = Records(queue)
    name = durable_id(CLIENT, "key")
    opened = await records.open(CLIENT, name, "print", 60)
    assert await records.open(CLIENT, name, "print", 60) == opened
    assert await records.find(CLIENT, name, "print") == opened
    store = ResponseStore(queue, 60)
    mine = StoredResponse(name, CLIENT, 0, "sim", b"{}")
    assert await store.open(mine) == (mine, True)
    assert await store.find(CLIENT, mine.id) == mine
    assert await store.status(mine) is None
    await store.delete(mine)
    assert await store.find(CLIENT, mine.id) is None


async def looks(queue: YardQueue, key: str) -> None:
    """Look for the leader, the models and a key."""
    assert await queue.connection.get(queue.keys.leader)
    run: Any = queue.connection
    assert await run.hgetall(queue.keys.hosts)
    assert await ModelWatch(queue, cast("FrontEnds", None), 1.0, OwnRules()).workers()
    lookup = PrincipalLookup(queue, needs_key=True)
    found = await lookup.find(Headers({"authorization": f"Bearer {key}"}))
    assert found.client == CLIENT
    with pytest.raises(GatewayError):
        await lookup.find(Headers({"authorization": "Bearer ty-unknown"}))


def test_a_gateway_needs_exactly_the_rights_of_its_user(guarded: GuardedServer) -> None:
    # Given a yard, and a key that an operator has created with the rights of `admin`
    day = Day(guarded)
    with day.plant:
        day.coordinator()
        day.worker("w", model_name="sim", max_num_seqs=4)
        day.plant.wait_for_workers(1)
        with day.connect("admin") as admin:
            key, key_id = create_key(admin, day.keys, "research")
            _, other = create_key(admin, day.keys, "other")
            assert revoke_key(admin, day.keys, other)
            assert list(list_keys(admin, day.keys)) == [key_id]
        denied(guarded)

        # If a gateway does all that gateways do on the broker,
        async def works() -> None:
            async with yard_queue(day) as queue:
                await asks_and_cancels(queue)
                await keeps(queue)
                await looks(queue, key)

        with monitored(guarded) as seen:
            asyncio.run(asyncio.wait_for(works(), 60))

        # I expect no refused command, and no unused right.
        assert denied(guarded) == []
        used = seen["gateway"] | in_scripts(SCRIPTS)
        assert granted("gateway") - used == set()


def test_a_gateway_acts_for_its_own_clients_only(guarded: GuardedServer) -> None:
    keys = Keys(random_name("yard"))
    with redis.Redis.from_url(guarded.url_of("gateway")) as connection:
        # Given its own clients,
        for name in ("http", CLIENT):
            assert connection.hget(keys.ledger(name, "q1"), "state") is None
            assert connection.xread({keys.reply(name, "q1"): "0"}) == []
        # I expect it to be refused those of others,
        for name in ("client", "bob", "httpd", "http-1", "batch_1"):
            commands: list[tuple[object, ...]] = [
                ("HGET", keys.ledger(name, "q1"), "state"),
                ("HSET", keys.ledger(name, "q1"), "state", "waiting"),
                ("GET", keys.tokens(name, "q1")),
                ("XREAD", "STREAMS", keys.reply(name, "q1"), 0),
                ("XADD", keys.reply(name, "q1"), "*", "event", "result"),
                ("GET", keys.http_record(name, "q1")),
                ("SET", keys.response(name, "q1"), "x"),
            ]
            assert [one for one in commands if not is_refused(connection, *one)] == []
        # all HTTP keys at once, and what belongs to operators and to the system.
        commands = [
            ("HGETALL", keys.api_keys),
            ("HKEYS", keys.api_keys),
            ("HSET", keys.api_keys, "digest", "{}"),
            ("HDEL", keys.api_keys, "digest"),
            ("HSET", keys.hosts, "h", "{}"),
            ("SET", keys.leader, "1:me"),
            ("HSET", keys.info, "rate", "1"),
            ("XADD", keys.intake("retry"), "*", "id", "q1"),
            ("XADD", keys.control, "*", "signal", "{}"),
            ("XRANGE", keys.dead, "-", "+"),
            ("HSET", keys.workers, "w.1", "{}"),
            ("SCRIPT", "LOAD", "return 1"),
            ("SCAN", 0),
            ("GET", "something else"),
        ]
        assert [one for one in commands if not is_refused(connection, *one)] == []


@pytest.mark.parametrize("user", ["client", "guest", "coordinator", "worker", "batch", "scaler"])
def test_only_gateways_and_operators_see_what_gateways_keep(
    guarded: GuardedServer, user: str
) -> None:
    keys = Keys("main")
    commands: list[tuple[object, ...]] = [
        ("HGETALL", keys.api_keys),
        ("HGET", keys.api_keys, "digest"),
        ("HSET", keys.api_keys, "digest", "{}"),
        ("GET", keys.http_record("http", "q1")),
        ("SET", keys.http_record("http", "q1"), "x"),
        ("GET", keys.response("http", "q1")),
        ("SET", keys.response("http", "q1"), "x"),
    ]
    with redis.Redis.from_url(guarded.url_of(user)) as connection:
        assert [one for one in commands if not is_refused(connection, *one)] == []


def test_with_the_further_rights_of_the_page_a_gateway_hands_batches_over(
    guarded: GuardedServer, tmp_path: Path
) -> None:
    # Given a user with the rights of a gateway, and those that docs/deploy.md adds
    (line,) = (one for one in USERS_FILE.read_text().splitlines() if " gateway " in one[:20])
    more = re.search(
        r"\+multi .*rq:\* .*\)", section(page("docs/deploy.md"), "### Batches by HTTP")
    )
    assert more
    words = re.findall(r"\([^)]+\)|\S+", f"{line.partition('gateway ')[2]} {more[0]}")
    with redis.Redis.from_url(guarded.url_of("default")) as keeper:
        keeper.execute_command("ACL", "SETUSER", "more", ">more", *words)
    denied(guarded)
    storage = FolderStorage(tmp_path)
    jobs = BatchJobs(storage, FileStore(storage), guarded.url_of("more"), random_name("yard"))
    # If it does what gateways do with batches,
    body = {"input_file_id": new_id(), "endpoint": "/v1/completions", "completion_window": "1h"}
    record = read_batch(body, CLIENT, None, 0)
    jobs.submit(Principal("research"), record)
    assert jobs.describe("research", record)["status"] == "validating"
    jobs.cancel(record)
    assert jobs.describe("research", record)["status"] == "cancelled"
    # I expect no refused command.
    assert denied(guarded) == []
