"""Batches of several tenants: who is next, and whose batch waits for a limit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rq import Retry
from rq.job import JobStatus

from tests.batch.conftest import BatchYard, RqYard, WriteLines, completion, objects
from tests.support.fake_clock import FakeClock, faked
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.batch import submit_batch
from tokenyard.batch.asking import Ending, WaitsForLimit, waiting_lines
from tokenyard.batch.files import read_lines
from tokenyard.batch.opening import OpenJob
from tokenyard.batch.rq import work
from tokenyard.batch.rq.jobs import KnownJob, describe
from tokenyard.batch.state import BatchSpec, load_state
from tokenyard.client.sync import Client
from tokenyard.protocol.errors import QuotaExceeded
from tokenyard.protocol.replies import Result
from tokenyard.protocol.tenants import TenantSettings, encode_tenant


class Waiting(RqYard):
    """A queue with batches of tenants, and a worker that takes them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.taking = self.worker()

    def submit(self, tenant: str) -> str:
        return self.enqueue(tenant=tenant).id

    def taken(self) -> Sequence[str]:
        """The tenants of all jobs that wait, in the order in which the worker takes them."""
        found = []
        while (taken := self.taking._take_job(None)) is not None:
            job = taken[0]
            assert isinstance(job, KnownJob)
            found.append(job.order.spec.tenant)
        return found


@pytest.fixture
def waiting(valkey_broker: Server, worker_context: None) -> Waiting:
    return Waiting(valkey_broker.url)


def test_tenants_have_turns(waiting: Waiting) -> None:
    # Given many batches of one tenant before those of others
    for tenant in ("a", "a", "a", "a", "b", "b", "", "c"):
        waiting.submit(tenant)
    # I expect one of each, then again.
    assert waiting.taken() == ["a", "b", "", "c", "a", "b", "a", "a"]
    # Who comes later goes before who had a turn since.
    for tenant in ("a", "c"):
        waiting.submit(tenant)
    assert waiting.taken() == ["c", "a"]


def test_batches_of_one_tenant_keep_their_order(waiting: Waiting) -> None:
    names = [waiting.submit("a") for _ in range(3)]
    waiting.taking._turns.arrange()
    assert waiting.queue.rq.get_job_ids() == names


def test_what_others_write_ends_no_worker(waiting: Waiting) -> None:
    for tenant in ("a", "b"):
        waiting.submit(tenant)
    waiting.connection.lpush(waiting.queue.rq.key, b"\xff", "no-such-job")
    waiting.connection.set(f"rq:turns:{waiting.queue.rq.name}", "text")
    assert sorted(waiting.taken()) == ["a", "b"]


@pytest.fixture
def held_clock() -> Iterator[FakeClock]:
    with faked(is_held=True) as clock:
        yield clock


class Limited:
    """Answers the first line; a limit refuses the rest."""

    def __init__(self, job: OpenJob, ending: Ending) -> None:
        self._job, self._ending = job, ending

    def answers(self, _check: object) -> Iterator[Any]:
        for number, _ in waiting_lines(
            self._job, self._ending, read_lines(self._job.state.spec.input_path)
        ):
            if number > 1:
                raise WaitsForLimit(self._job, "tokens_per_day: reached", 7200.0)
            yield number, self._ending.line(number, None)

    def interrupt(self) -> None: ...

    def cancel(self) -> None: ...


@pytest.mark.parametrize(("window_s", "pause_s"), [(0.0, 300), (60.0, 60)])
def test_a_batch_that_waits_for_a_limit_gives_its_worker_back(
    waiting: Waiting,
    monkeypatch: pytest.MonkeyPatch,
    write_lines: WriteLines,
    tmp_path: Path,
    held_clock: FakeClock,
    window_s: float,
    pause_s: int,
) -> None:
    # Given a running job of three lines, of which a limit admits one
    source = write_lines("in.jsonl", [completion(number) for number in range(3)])
    spec = BatchSpec(
        input=str(source),
        output=str(tmp_path / "out.jsonl"),
        completion_window_s=window_s,
        window_from=held_clock.wall(),
    )
    job = waiting.given(spec, monkeypatch)

    @contextlib.contextmanager
    def asking(opened: OpenJob, ending: Ending) -> Iterator[Limited]:
        yield Limited(opened, ending)

    # If it is carried out, I expect RQ to run it again later, with what it has.
    again = work.carry_out(job.order, asking)
    assert isinstance(again, Retry)
    assert again.intervals == [pause_s]
    state = load_state(spec.state_path)
    assert state is not None
    assert (state.status, state.counts.done, state.counts.total) == ("in_progress", 1, 3)
    found = describe(waiting.queue.find(job.id))
    assert (found["status"], found["errors"]) == ("in_progress", None)
    # And a status that says for what it waits.
    job.set_status(JobStatus.SCHEDULED)
    waiting.queue.rq.schedule_job(job, work.now())
    assert "tokens_per_day: reached" in waiting.queue.waits_for(waiting.queue.find(job.id))


def test_a_map_ends_where_a_limit_refuses_it_for_long(plant: Plant) -> None:
    packed = encode_tenant(TenantSettings(tokens_per_day=40))
    plant.connection.hset(plant.keys.tenants, "poor", packed)
    prompts = [{"prompt": f"prompt {number}", "max_tokens": 4} for number in range(20)]
    found: list[tuple[int, Result]] = []
    with (
        Client(plant.url, plant.keys.yard) as client,
        pytest.raises(QuotaExceeded, match="tokens_per_day"),
    ):
        found.extend(client.map(prompts, tenant="poor", patience_s=0.2))
    # What was admitted before has its result.
    assert 0 < len(found) < 20
    assert all(result.ok for _, result in found)


@pytest.mark.long
def test_a_tenant_at_its_limit_holds_up_nobody(yard: BatchYard) -> None:
    # Given a tenant whose limit has room for nothing, and its job before another's
    plant = yard.plant

    def limit(tokens: int) -> None:
        packed = encode_tenant(TenantSettings(tokens_per_day=tokens))
        plant.connection.hset(plant.keys.tenants, "poor", packed)

    limit(40)
    lines = [completion(number) for number in range(100)]
    source = yard.write("in.jsonl", lines)
    ends = {"redis_url": plant.url, "yard": plant.keys.yard}
    poor = submit_batch(source, yard.folder / "poor.jsonl", tenant="poor", **ends)
    other = submit_batch(source, yard.folder / "other.jsonl", tenant="other", **ends)
    yard.work()
    # I expect the other's to complete meanwhile,
    assert other.wait(50)["status"] == "completed"
    waits = eventually(lambda: yard.seen(poor.id)["waits_for"])
    assert "tokens_per_day" in waits
    before = poor.status()
    assert before["status"] == "in_progress"
    assert 0 < before["request_counts"]["completed"] < 100
    # and the job to go on when it is raised.
    limit(100_000)
    plant.connection.zadd(yard.queue.rq.scheduled_job_registry.key, {poor.id: 1}, xx=True)
    assert poor.wait(50)["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert len({one["id"] for one in objects(yard.folder / "poor.jsonl")}) == 100
