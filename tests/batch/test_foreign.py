"""Jobs in RQ's queue that somebody else has written: told apart, listed and never run."""

from __future__ import annotations

import json
import logging
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rq import Callback, Queue, Repeat
from rq.exceptions import DequeueTimeout
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.batch.conftest import RqYard
from tests.support.servers import Server
from tokenyard.batch.rq.callbacks import succeeded
from tokenyard.batch.rq.jobs import JobOrder, UnknownJob, describe
from tokenyard.batch.rq.listing import list_jobs
from tokenyard.batch.rq.work import WorkerContext
from tokenyard.batch.state import BatchSpec
from tokenyard.telemetry.queues import queue_name

ORDER = {"spec": {"input": "/in", "output": "/out"}}
MINE = "tokenyard.batch.rq.work.perform"


class Trap:
    """What a pickle does when it is loaded."""

    opened: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return spring, ("pickle",)


def spring(*words: Any) -> None:
    """What no worker may call."""
    Trap.opened.append(str(words))


SPRING = f"{__name__}.spring"


class Others(RqYard):
    """A queue with one good batch job, and whoever else writes to it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.json = Queue(
            queue_name(self.yard), connection=self.connection, serializer=JSONSerializer
        )
        self.pickled = Queue(queue_name(self.yard), connection=self.connection)

    def good(self) -> str:
        return self.enqueue().id

    def spoil(self, **fields: bytes) -> str:
        name = self.good()
        self.connection.hset(Job.key_for(name), mapping={**fields})
        return name

    def take(self) -> str:
        """The job that a worker would run next; "" if there is none."""
        worker = self.worker()
        worker.clean_registries()
        try:
            taken = worker._take_job(None)
        except DequeueTimeout:
            return ""
        return taken[0].id if taken else ""


@pytest.fixture
def others(valkey_broker: Server, worker_context: None) -> Others:
    Trap.opened.clear()
    return Others(valkey_broker.url)


def _of_another_type(others: Others) -> str:
    others.connection.set(Job.key_for("text"), "text")
    others.connection.rpush(others.json.key, "text")
    return "text"


FOREIGN: dict[str, Callable[[Others], str]] = {
    "a pickle of an unknown module": lambda it: it.pickled.enqueue("nowhere.work", Trap()).id,
    "a pickle as its meta": lambda it: it.spoil(data=b"x", meta=pickle.dumps(Trap())),
    "another function": lambda it: it.json.enqueue(SPRING, "function").id,
    "a method": lambda it: it.spoil(data=zlib.compress(b'["upper", "text", [], {}]')),
    "no function": lambda it: it.spoil(data=zlib.compress(b"[null, null, [], {}]")),
    "no arguments": lambda it: it.json.enqueue(MINE).id,
    "a call-back on success": lambda it: (
        it.json.enqueue(MINE, order=ORDER, on_success=Callback(SPRING)).id
    ),
    "a call-back on failure": lambda it: (
        it.json.enqueue(MINE, order=ORDER, on_failure=Callback(SPRING)).id
    ),
    "a call-back on a stop": lambda it: (
        it.json.enqueue(MINE, order=ORDER, on_stopped=Callback(SPRING)).id
    ),
    "repeated": lambda it: it.json.enqueue(SPRING, repeat=Repeat(times=2)).id,
    "a corrupt time": lambda it: it.spoil(created_at=b"yesterday"),
    "a corrupt state": lambda it: it.spoil(status=b"exploded"),
    "names that are no text": lambda it: it.spoil(data=b"\xff"),
    "no hash": _of_another_type,
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_job_is_listed_as_such_and_refused_by_workers(
    others: Others, caplog: pytest.LogCaptureFixture, write: Callable[[Others], str]
) -> None:
    foreign, mine = write(others), others.good()
    # I expect every command to tell them apart,
    listed = _run(others, "list", "--json")
    found = {one["id"]: one for one in map(json.loads, _lines(listed))}
    assert found.keys() == {foreign, mine}
    assert found[foreign]["status"] == "foreign"
    assert "the job " in found[foreign]["errors"]["data"][0]["message"]
    table = _run(others, "list")
    assert "foreign" in table
    assert mine in table
    with pytest.raises(UnknownJob):
        describe(others.queue.find(foreign))
    for command in ("status", "cancel", "resume", "results", "logs"):
        assert "Error: job " in _run(others, command, foreign, status=1)
    # a worker that asks for a job to get the batch job behind the foreign one,
    with caplog.at_level(logging.WARNING, "tokenyard.batch"):
        assert others.take() == mine
    # and the other to be refused with the reason, and nothing of it to be loaded or called.
    assert f"{foreign}' is refused: it" in caplog.text
    assert others.take() == ""
    assert list_jobs(others.queue, ["ended early"]).foreign.keys() == {foreign}
    assert Trap.opened == []


def _run(others: Others, *words: str, status: int = 0) -> str:
    done = others.call(*words)
    assert done.exit_code == status, done.output
    return done.output


def _lines(printed: str) -> list[str]:
    return [json.dumps(one) for one in json.loads(printed)]


@pytest.mark.parametrize(
    "name",
    [b"\xff\xfe", b"a:b", b"spaces and \x1b[31m"],
    ids=["no text", "two parts", "control characters"],
)
def test_a_name_that_is_none_ends_no_worker(others: Others, name: bytes) -> None:
    queue = others.json
    others.connection.rpush(queue.key, name)
    others.connection.rpush(queue.intermediate_queue_key, name)
    others.connection.zadd(queue.scheduled_job_registry.key, {name: 1})
    others.connection.zadd(queue.started_job_registry.key, {name + b":run": 1})
    mine = others.good()

    assert mine in _run(others, "list", "--json")
    assert others.take() == mine
    assert others.connection.zcard(queue.started_job_registry.key) == 0


def test_a_foreign_scheduled_job_does_not_hold_up_the_others(others: Others) -> None:
    # Given a job that cannot be read, whose time has come
    foreign = others.spoil(created_at=b"yesterday")
    others.json.remove(foreign)
    others.connection.zadd(others.json.scheduled_job_registry.key, {foreign: 1})
    # I expect it to be refused, before RQ's scheduler would end of it.
    worker = others.worker()
    worker.clean_registries()
    assert others.json.scheduled_job_registry.get_job_ids() == []
    assert list_jobs(others.queue, ["ended early"]).foreign == {foreign: "cannot be read"}


def test_a_worker_that_runs_no_commands_says_so(
    others: Others,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WorkerContext, "runs_commands", False)
    touched = tmp_path / "touched"
    order = JobOrder(spec=BatchSpec(input="/in", output="/out"), on_success=f"touch {touched}")
    succeeded(others.queue.find(others.queue.enqueue(order).id), others.connection, None)
    assert f"this worker runs no commands: touch {touched}" in caplog.text
    assert not touched.exists()


def test_an_abandoned_job_that_was_changed_calls_nothing(others: Others) -> None:
    # Given a job that began, and got another call-back since
    mine = others.good()
    others.json.remove(mine)
    others.connection.hset(Job.key_for(mine), "failure_callback_name", SPRING)
    key = others.json.started_job_registry.key
    others.connection.zadd(key, {f"{mine}:{'0' * 32}": 1})
    # If its worker is gone, I expect another one to call nothing.
    worker = others.worker()
    worker._clean_at = 0
    worker.clean_registries()
    assert others.connection.zcard(key) == 0
    assert Trap.opened == []
