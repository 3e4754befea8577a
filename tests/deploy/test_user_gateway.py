"""The user `gateway` can do what gateways do on the broker, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
import redis
from rq.job import JobStatus

from tests.deploy.day import Day
from tests.deploy.rights import denied, granted, in_scripts, is_refused, monitored
from tests.support.api_keys import create_key
from tests.support.brokers import GuardedServer
from tests.support.builders import make_request, random_name
from tokenyard.batch.rq.jobs import BatchQueue
from tokenyard.broker.connection import open_connection
from tokenyard.ops.keys import list_keys, revoke_key
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Request, SamplingParams

pytest.importorskip("vllm", reason="the gateway's front end is vLLM's")

from starlette.datastructures import Headers

from gateway.announcements import OwnRules
from gateway.batches.files import FileStore, new_id
from gateway.batches.jobs import BatchJobs
from gateway.batches.records import read_batch
from gateway.batches.storage import FolderStorage
from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError
from gateway.http.principal import Principal, PrincipalLookup
from gateway.http.records import Records, durable_id
from gateway.models import ModelWatch
from gateway.queue.yard import YardQueue
from gateway.responses.store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    from gateway.frontend.models import FrontEnds

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
    while await queue.broker.connection.hget(state, "state") != b"cancelled":  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def keeps(queue: YardQueue) -> None:
    """Keep a record and a response, and forget the response."""
    records = Records(queue)
    name = durable_id(CLIENT, "key")
    opened, is_new = await records.open(CLIENT, name, "print", 60)
    assert is_new
    assert await records.open(CLIENT, name, "print", 60) == (opened, False)
    assert await records.find(CLIENT, name, "print") == opened
    await records.forget(CLIENT, name)
    assert (await records.open(CLIENT, name, "print", 60))[1]
    store = ResponseStore(queue, 60)
    mine = StoredResponse(name, CLIENT, 0, "sim", b"{}")
    await queue.broker.carry_out([await store.reserve(mine)])
    assert await store.find(CLIENT, mine.id) == mine
    assert await store.status(mine) is None
    await store.delete(mine)
    assert await store.find(CLIENT, mine.id) is None


async def looks(queue: YardQueue, key: str) -> None:
    """Look for the leader, the models and a key."""
    assert await queue.broker.connection.get(queue.keys.leader)
    run: Any = queue.broker.connection
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
            key, key_id = create_key(Yard(admin, day.keys), "research")
            _, other = create_key(Yard(admin, day.keys), "other")
            assert revoke_key(Yard(admin, day.keys), other)
            assert list(list_keys(Yard(admin, day.keys))) == [key_id]
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
        assert connection.xread({keys.replies(f"gateway.{'0' * 32}"): "0"}) == []
        # I expect it to be refused those of others,
        for name in ("client", "bob", "httpd", "http-1", "batch_1"):
            commands: list[tuple[object, ...]] = [
                ("HGET", keys.ledger(name, "q1"), "state"),
                ("HSET", keys.ledger(name, "q1"), "state", "waiting"),
                ("GET", keys.tokens(name, "q1")),
                ("XREAD", "STREAMS", keys.replies(name), 0),
                ("XADD", keys.reply(name, "q1"), "*", "event", "result"),
                ("GET", keys.http_record(name, "q1")),
                ("SET", keys.response(name, "q1"), "x"),
                ("HINCRBY", keys.stored(name), 1, 1),
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


@pytest.mark.parametrize("user", ["client", "coordinator", "worker", "batch"])
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


@pytest.fixture(scope="module", params=["valkey", "redis"])
def with_batches(
    request: pytest.FixtureRequest,
    no_leftover_processes: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GuardedServer]:
    """A server whose gateways have batches."""
    folder = tmp_path_factory.mktemp(f"{request.param}-batches")
    server = GuardedServer(request.param, folder, ("gateway", "worker", "default"), batches=True)
    server.start()
    yield server
    server.stop()


def test_with_batches_a_gateway_hands_jobs_to_rq(
    with_batches: GuardedServer, tmp_path: Path
) -> None:
    denied(with_batches)
    storage = FolderStorage(tmp_path)
    url = with_batches.url_of("gateway")
    yard = random_name("yard")
    jobs = BatchJobs(storage, FileStore(storage), url, yard)
    body = {"input_file_id": new_id(), "endpoint": "/v1/completions", "completion_window": "1h"}
    # If it does what gateways do with batches: one is cancelled, one given up,
    cancelled, failed = (read_batch(body, CLIENT, None, int(time.time())) for _ in range(2))
    for record in (cancelled, failed):
        jobs.submit(Principal(tenant="research"), record)
        assert jobs.describe("research", record)["status"] == "validating"
    jobs.cancel(cancelled)
    assert jobs.describe("research", cancelled)["status"] == "cancelled"
    with open_connection(with_batches.url_of("default")) as keeper:
        BatchQueue(keeper, yard).find(failed.id).set_status(JobStatus.FAILED)
    assert jobs.describe("research", failed)["status"] == "failed"
    # I expect no refused command.
    assert denied(with_batches) == []


#: What RQ's keys would allow, and a gateway does not need.
OF_RQ: Final[list[tuple[object, ...]]] = [
    ("PUBLISH", "rq:pubsub:w", "stop"),
    ("SUBSCRIBE", "rq:pubsub:w"),
    ("EVAL", "return 1", 0),
    ("SCRIPT", "LOAD", "return 1"),
    ("SORT", "rq:workers"),
    ("RENAME", "rq:queue:a", "rq:queue:b"),
    ("XADD", "rq:results:a", "*", "a", "b"),
    ("SCAN", 0),
    ("KEYS", "rq:*"),
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("MIGRATE", "a", 1, "rq:job:a", 0, 10),
    ("HSET", "rqs:job:a", "b", "c"),
    ("SET", "tokenyard:{main}:rq", "a"),
    ("XRANGE", "tokenyard:{main}:dead", "-", "+"),
    ("HGETALL", "tokenyard:{main}:api_keys"),
]


def test_with_batches_a_gateway_gets_no_other_rights(with_batches: GuardedServer) -> None:
    with redis.Redis.from_url(with_batches.url_of("gateway")) as connection:
        assert not is_refused(connection, "HSET", "rq:job:a", "b", "c")
        assert [one for one in OF_RQ if not is_refused(connection, *one)] == []


@pytest.mark.parametrize(
    "command", [("HSET", "rq:job:a", "b", "c"), ("LPUSH", "rq:queue:a", "b"), ("MULTI",)], ids=str
)
def test_without_batches_a_gateway_has_nothing_to_do_with_rq(
    guarded: GuardedServer, command: tuple[object, ...]
) -> None:
    with redis.Redis.from_url(guarded.url_of("gateway")) as connection:
        assert is_refused(connection, *command)


def test_the_line_of_further_rights_is_no_user(
    guarded: GuardedServer, with_batches: GuardedServer
) -> None:
    for server in (guarded, with_batches):
        with redis.Redis.from_url(server.url_of("default")) as keeper:
            users = keeper.acl_users()
        assert "gateway" in users
        assert "gateway-batches" not in users
