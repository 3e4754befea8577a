"""The user `batch` can run batch jobs, and manage them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis

from tests.batch import running
from tests.deploy.day import Day
from tests.deploy.rights import denied, is_refused
from tests.support.brokers import GuardedServer
from tests.support.builders import make_request
from tests.support.waiting import eventually
from tokenyard.protocol.wire import SamplingParams

if TYPE_CHECKING:
    from gateway.frontend.models import FrontEnds

RUN_S = 60.0


@pytest.fixture
def day(guarded: GuardedServer) -> Iterator[Day]:
    day = Day(guarded)
    with day.plant:
        day.coordinator()
        day.worker("w", model_name="sim", max_num_seqs=4)
        day.plant.wait_for_workers(1)
        yield day


def as_batch(day: Day) -> Any:
    """The yard, as the user `batch` enters it."""
    return SimpleNamespace(url=day.url("batch"), keys=day.keys)


def batch(day: Day, *arguments: object) -> str:
    done = running.batch(as_batch(day), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def lines(path: Path, count: int, max_tokens: int) -> Path:
    items = [{"id": str(n), "tokens": [n + 1], "params": {"max_tokens": max_tokens}}
             for n in range(count)]  # fmt: skip
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return path


def test_batch_jobs_need_only_the_rights_of_their_user(
    day: Day, guarded: GuardedServer, tmp_path: Path
) -> None:
    # Given a yard, a short file and a long one
    denied(guarded)
    short, long = lines(tmp_path / "a.jsonl", 30, 4), lines(tmp_path / "b.jsonl", 8, 2000)

    # If jobs go through every command with the rights of `batch`,
    done = batch(day, "submit", short, "-o", tmp_path / "a.out.jsonl")
    after = batch(day, "submit", short, "-o", tmp_path / "c.out.jsonl", "--after", done)
    later = batch(day, "submit", short, "-o", tmp_path / "d.out.jsonl", "--at", "+90m")
    batch(day, "worker", "--burst")
    for job in (done, after):
        assert json.loads(batch(day, "status", job, "--json"))["status"] == "completed"
    batch(day, "cancel", later)
    batch(day, "list")
    batch(day, "results", done)
    batch(day, "logs", done)
    stopped = batch(day, "submit", long, "-o", tmp_path / "b.out.jsonl")
    worker = running.start(as_batch(day), tmp_path / "log", "worker")
    eventually(lambda: day.plant.connection.xlen(day.keys.intake("low")), timeout_s=RUN_S)
    batch(day, "cancel", stopped)
    worker.terminate()
    worker.wait(RUN_S)

    # I expect no refused command except `client list`, which RQ does without,
    said = set(denied(guarded)) - {"batch: toplevel command client|list"}
    assert not said, (tmp_path / "log").read_text()
    # and no access to other clients' requests.
    with redis.Redis.from_url(day.url("batch")) as connection:
        assert is_refused(connection, "HGETALL", day.keys.ledger("client", "q1"))
        assert is_refused(connection, "GET", "something else")


def test_a_batch_of_a_gateway_asks_with_the_same_rights(day: Day, guarded: GuardedServer) -> None:
    pytest.importorskip("vllm", reason="the gateway's front end is vLLM's")
    from gateway.http.context import RequestContext
    from gateway.models import ModelWatch
    from gateway.queue.yard import YardQueue

    client = "batch_1"

    async def answer(queue: YardQueue, context: RequestContext, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        request = make_request(client=client, params=params, model="sim")
        async with aclosing(queue.ask(request, context)) as replies:
            assert [one.event async for one in replies] == ["result"]

    async def works() -> None:
        """Ask for an answer as the front end does, leave another one, and look at the fleet."""
        queue = YardQueue(day.url("batch"), day.keys.yard, client)
        await queue.start()
        await answer(queue, RequestContext("a", client, 0.0, priority_class="low"), 5)
        context = RequestContext("b", client, 0.0, priority_class="low")
        left = asyncio.create_task(answer(queue, context, 2000))
        await context.ticket.decided.wait()
        left.cancel()
        await asyncio.wait([left])
        run: Any = queue.broker.connection
        assert await run.hgetall(queue.keys.hosts)
        assert await ModelWatch(queue, cast("FrontEnds", None), 1.0).workers()
        await queue.stop()

    denied(guarded)
    asyncio.run(asyncio.wait_for(works(), RUN_S))
    assert denied(guarded) == []
