"""The metrics of a live yard, and the page that explains them."""

from __future__ import annotations

import json
import math
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import gateway.metrics
import worker.host.metrics
from coordinator.telemetry import metrics as coordinator_metrics
from coordinator.telemetry.tenant_series import OTHER
from tests.deploy.metrics import OURS, asked_for
from tests.support.brokers import DEPLOY
from tests.support.builders import make_request
from tests.support.processes import START_S, Plant
from tests.support.servers import Server, free_port
from tests.support.streams import streams
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.batch import run_batch
from tokenyard.protocol.errors import QueueFull, SettingsError
from tokenyard.protocol.keys import is_tenant
from tokenyard.protocol.tenants import day_before
from tokenyard.protocol.wire import SamplingParams
from tokenyard.telemetry.endpoint import Endpoint
from tokenyard.telemetry.health import Health
from tokenyard.telemetry.metrics import BUCKETS_S, Metric
from tokenyard.telemetry.queues import queue_name
from worker.engines.crash_points import FAULTY

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Watched(Plant):
    """A yard whose endpoints are read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.ports: list[int] = []

    def lead(self, **options: object) -> int:
        self.ports.append(free_port())
        self.coordinator(metrics_port=self.ports[-1], **options)
        return self.ports[-1]

    def serve(self, **options: object) -> int:
        self.ports.append(free_port())
        self.worker(metrics_port=self.ports[-1], **options)
        return self.ports[-1]


def text_of(port: int) -> str:
    def page() -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:  # it does not listen yet
            return None

    return eventually(page, timeout_s=START_S) or ""


def samples(port: int) -> Samples:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text_of(port))
        for one in family.samples
    }


def value(port: int, name: str, **labels: str) -> float:
    """A value that an endpoint shows; not a number where it does not."""
    return samples(port).get((name, frozenset(labels.items())), math.nan)


def reaches(port: int, count: float, name: str, **labels: str) -> bool:
    """Wait until a value is there; workers tell theirs once a second."""
    return eventually(lambda: value(port, name, **labels) == count, timeout_s=START_S)


@pytest.fixture
def plant(valkey_broker: Server) -> Iterator[Watched]:
    with Watched(valkey_broker.url) as plant:
        yield plant


@pytest.mark.long
def test_known_counters_start_at_zero(plant: Watched) -> None:
    # Given a yard without any requests
    leader, host = plant.lead(), plant.serve(slots=2)
    plant.wait_for_leader()
    plant.wait_for_workers(2)

    # I expect all counters of both at 0, for all that can happen
    found = {**samples(leader), **samples(host)}
    for name, labels in (
        ("tokenyard_requests_total", {"model": "sim", "priority": "low", "outcome": "completed"}),
        ("tokenyard_requests_total", {"model": "", "priority": "high", "outcome": "cancelled"}),
        ("tokenyard_requests_rejected_total", {"reason": "QUEUE_FULL"}),
        ("tokenyard_retries_total", {"reason": "fault"}),
        ("tokenyard_retries_total", {"reason": "crashed"}),
        ("tokenyard_dead_total", {"reason": "POISONED"}),
        ("tokenyard_tokens_total", {"model": "sim", "direction": "output"}),
        ("tokenyard_ttft_seconds_count", {"model": "sim"}),
        ("tokenyard_queue_wait_seconds_count", {"priority": "retry"}),
        ("tokenyard_inflight", {"worker": "w-1", "model": "sim"}),
        ("tokenyard_worker_restarts_total", {"worker": "w-0", "reason": "lost"}),
        ("tokenyard_queue_depth", {"queue": "high", "priority": "high"}),
    ):
        assert found[name, frozenset(labels.items())] == 0, (name, labels)

    # and the leader, and the workers.
    assert value(leader, "tokenyard_leader") == 1
    assert value(leader, "tokenyard_worker_up", worker="w-0") == 1
    assert value(leader, "tokenyard_worker_state", worker="w-1", state="ready") == 1
    assert value(leader, "tokenyard_worker_state", worker="w-1", state="failed") == 0
    assert 0 <= value(leader, "tokenyard_worker_lease_age_seconds", worker="w-0") < 30
    assert 0 < value(leader, "tokenyard_redis_memory_ratio") < 1


@pytest.mark.long
def test_running_and_ended_requests_are_counted(plant: Watched) -> None:
    leader, host = plant.lead(), plant.serve()
    plant.wait_for_workers(1)
    # Given a stream, a request without one, and requests that end otherwise
    params = SamplingParams(max_tokens=20)
    stream = make_request(params=params, stream=True, model="sim")
    plain = make_request(params=params)
    wrong = make_request(tokens=[1] * 9000)
    strange = make_request(model="no such")
    late = make_request(deadline_ms=1)
    asked = [stream, plain, wrong, strange, late]
    plant.push_all(asked)
    plant.results(asked)

    # I expect each counted once, by the process that answered it,
    ends = "tokenyard_requests_total"
    assert reaches(host, 2, ends, model="sim", priority="normal", outcome="completed")
    assert reaches(host, 1, ends, model="sim", priority="normal", outcome="failed")
    assert reaches(leader, 1, ends, model="", priority="normal", outcome="failed")
    expired = [value(leader, ends, model=one, priority="normal", outcome="expired")
               for one in ("", "sim")]  # fmt: skip
    assert sum(expired) == 1
    assert value(leader, "tokenyard_requests_rejected_total", reason="MODEL_UNAVAILABLE") == 1
    # with its tokens and times.
    assert value(host, "tokenyard_tokens_total", model="sim", direction="output") == 40
    assert value(host, "tokenyard_tokens_total", model="sim", direction="input") == 6
    assert value(host, "tokenyard_e2e_seconds_count", model="sim") == 3
    assert value(host, "tokenyard_ttft_seconds_count", model="sim") == 1
    assert value(leader, "tokenyard_queue_wait_seconds_count", priority="normal") == 3
    assert value(leader, "tokenyard_assign_seconds_count") >= 1
    # A name that a client made up is in no label.
    assert "no such" not in text_of(leader)


@pytest.mark.long
def test_prefix_matches_are_measured(plant: Watched) -> None:
    # Given a prompt of two blocks that comes again, and one like it in the first
    leader = plant.lead(policy="prefix_affinity")
    plant.serve()
    plant.wait_for_workers(1)
    first, like_it = [5] * 32, [5] * 16 + [6] * 16
    for tokens in (first, first, like_it):
        request = make_request(tokens=tokens)
        plant.push(request)
        plant.result(request.id)

    # I expect nothing of the first to be known, all of the second, half of the third.
    name = "tokenyard_route_prefix_match_ratio"
    assert value(leader, f"{name}_count") == 3
    assert value(leader, f"{name}_sum") == 1.5


@pytest.mark.long
def test_a_scrape_logs_nothing(plant: Watched) -> None:
    port = free_port()
    leader = plant.coordinator(metrics_port=port)
    plant.serve()
    plant.wait_for_workers(1)
    eventually(lambda: "w.1 serves sim" in leader.log)
    for _ in range(3):
        assert value(port, "tokenyard_worker_up", worker="w") == 1
    assert leader.log.count("w.1 serves sim") == 1


def test_waiting_requests_are_shown(plant: Watched) -> None:
    # Given requests and no worker
    leader = plant.lead()
    plant.wait_for_leader()
    with Client(plant.url, plant.keys.yard) as client:
        client.submit_many([[1] * 10] * 3, priority_class="low")
        client.submit([1] * 5)
        client.submit([1] * 5, tenant="ann", priority_class="high")
        client.submit([1] * 5, tenant="other", priority_class="high")

    assert value(leader, "tokenyard_queue_depth", queue="low", priority="low") == 3
    assert value(leader, "tokenyard_queue_depth", queue="normal", priority="normal") == 1
    assert value(leader, "tokenyard_queue_tokens", queue="all") == 45
    assert value(leader, "tokenyard_queue_oldest_age_seconds", queue="low") > 0
    assert value(leader, "tokenyard_queue_oldest_age_seconds", queue="high") > 0
    assert value(leader, "tokenyard_queue_oldest_age_seconds", queue="retry") == 0
    # A tenant may be called as it likes, and is never mixed with those that have no series.
    assert value(leader, "tokenyard_tenant_waiting", tenant="ann") == 1
    assert value(leader, "tokenyard_tenant_waiting", tenant="other") == 1
    assert value(leader, "tokenyard_tenant_waiting", tenant=OTHER) == 4
    assert not is_tenant(OTHER)


@pytest.mark.long
def test_usage_of_tenants_is_counted(plant: Watched) -> None:
    # Given tenants that the metrics know, and what one of them used before
    leader = plant.lead()
    plant.serve(simulated_step_s=0.01)
    plant.wait_for_workers(1)
    plant.connection.zadd(plant.keys.service, {"ann": 1, "bob": 1})
    today = day_before(time.time(), 0)
    plant.connection.hset(plant.keys.usage("ann"), f"{today} sim requests", 100)
    assert reaches(
        leader, 0, "tokenyard_requests_total", model="sim", priority="low", outcome="failed"
    )
    assert value(leader, "tokenyard_tenant_requests_total", tenant="ann", outcome="completed") == 0

    # If requests of theirs end in all ways,
    with Client(plant.url, plant.keys.yard) as client:
        asked = client.submit_many([[1, 2, 3]] * 4, tenant="ann", max_tokens=5)
        asked += client.submit_many([[1] * 9000], tenant="ann", max_tokens=5)
        asked += client.submit_many([[1, 2]], tenant="bob", max_tokens=5)
        for handle in asked:
            handle.wait(60)
        late = client.submit([1], tenant="ann", max_tokens=6000, deadline_s=0.3)
        assert late.wait(60).status == "expired"
        gone = client.submit([1], tenant="ann", max_tokens=6000)
        gone.cancel()
        gone.wait(60)

    # I expect each to be counted once for its tenant,
    ends = "tokenyard_tenant_requests_total"
    assert reaches(leader, 4, ends, tenant="ann", outcome="completed")
    for outcome in ("failed", "expired", "cancelled"):
        assert reaches(leader, 1, ends, tenant="ann", outcome=outcome)
    assert value(leader, ends, tenant="bob", outcome="completed") == 1
    # with its tokens and waits.
    tokens = "tokenyard_tenant_tokens_total"
    assert value(leader, tokens, tenant="bob", direction="input") == 2
    assert value(leader, tokens, tenant="bob", direction="output") == 5
    assert value(leader, "tokenyard_tenant_cached_tokens_total", tenant="bob") == 0
    assert value(leader, "tokenyard_tenant_wait_seconds_bucket", tenant="bob", le="+Inf") == 1
    assert value(leader, "tokenyard_tenant_wait_seconds_bucket", tenant="bob", le="4194.304") == 1


def test_answers_of_scripts_are_counted_once(plant: Watched) -> None:
    # Given a yard with room for two, and one coordinator behind the other
    leader = plant.lead(max_num_queued_reqs=2)
    plant.wait_for_leader()
    other = plant.lead(max_num_queued_reqs=2)
    with Client(plant.url, plant.keys.yard) as client:
        handles = client.submit_many([[1], [2]])
        for _ in range(3):
            with pytest.raises(QueueFull):
                client.submit([3])
        handles[0].cancel()

    # I expect refusals and cancels from the leader alone, after any number of scrapes.
    for _ in range(2):
        full = "tokenyard_requests_rejected_total"
        assert value(leader, full, reason="QUEUE_FULL") == 3
        cancelled = {"model": "", "priority": "normal", "outcome": "cancelled"}
        assert value(leader, "tokenyard_requests_total", **cancelled) == 1
        assert value(other, full, reason="QUEUE_FULL") == 0
    assert value(other, "tokenyard_leader") == 0
    assert value(other, "tokenyard_redis_up") == 1
    assert "tokenyard_queue_depth{" not in text_of(other)


def test_lines_of_batch_jobs_are_counted(plant: Watched, tmp_path: Path) -> None:
    leader = plant.lead()
    plant.serve()
    plant.wait_for_workers(1)
    assert value(leader, "tokenyard_batch_lines_total", state="completed") == 0
    (tmp_path / "in.jsonl").write_text('{"id":"a","prompt":"a","max_tokens":1}\n{broken\n')
    run_batch(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", redis_url=plant.url, yard=plant.keys.yard
    )
    assert value(leader, "tokenyard_batch_lines_total", state="completed") == 1
    assert value(leader, "tokenyard_batch_lines_total", state="failed") == 1
    # And if jobs wait at RQ, I expect them and their workers to be shown.
    plant.connection.lpush(f"rq:queue:{queue_name(plant.keys.yard)}", "one", "two")
    assert value(leader, "tokenyard_batch_jobs_waiting") == 2
    assert value(leader, "tokenyard_batch_workers") == 0


@pytest.mark.long
def test_counts_outlive_their_process(plant: Watched) -> None:
    # Given a worker that has reported its counts, and has begun another request
    leader, host = plant.lead(), plant.serve(simulated_step_s=0.01)
    plant.wait_for_workers(1)
    params = SamplingParams(max_tokens=10)
    done = [make_request(params=params) for _ in range(3)]
    plant.push_all(done)
    plant.results(done)
    labels = {"model": "sim", "priority": "normal", "outcome": "completed"}
    assert reaches(host, 3, "tokenyard_requests_total", **labels)
    running = make_request(params=SamplingParams(max_tokens=200), stream=True)
    plant.push(running)
    eventually(lambda: plant.published(running.id))

    # If it is killed,
    (info,) = plant.roster().values()
    psutil.Process(info.pid).kill()
    assert plant.result(running.id).ok

    # I expect the sum of its counts and its successor's,
    assert reaches(host, 4, "tokenyard_requests_total", **labels)
    assert value(host, "tokenyard_worker_restarts_total", worker="w", reason="lost") == 1
    assert value(host, "tokenyard_model_swap_seconds_count", phase="load") == 2
    # and the request among those that were taken back.
    assert value(leader, "tokenyard_redeliveries_total") == 1
    assert value(leader, "tokenyard_retries_total", reason="lost") == 1
    assert value(leader, "tokenyard_queue_wait_seconds_count", priority="retry") == 1


@pytest.mark.long
def test_faults_and_dead_letters_are_counted(plant: Watched) -> None:
    leader = plant.lead(max_faults=2)
    host = plant.serve(crash_point="fault:9", slots=2, backoff_s=0.05)
    plant.wait_for_workers(2)
    faulty = make_request(tokens=[*FAULTY, 1])
    plant.push(faulty)
    error = plant.result(faulty.id).error
    assert error
    assert error.code == "INFERENCE_ERROR"
    plant.connection.xadd(plant.keys.intake("normal"), {"nobody": "1"})

    assert reaches(host, 2, "tokenyard_retries_total", reason="fault")
    assert reaches(leader, 1, "tokenyard_dead_total", reason="INFERENCE_ERROR")
    assert reaches(leader, 1, "tokenyard_dead_total", reason="UNANSWERABLE")


@pytest.mark.long
def test_model_swaps_are_counted(plant: Watched) -> None:
    # Given a host that holds none of its models
    models = plant.write("models.toml", '[models.a]\npath = "org/a"\n[models.b]\npath = "org/b"\n')
    leader, port = plant.lead(), free_port()
    plant.host(models, metrics_port=port)
    eventually(lambda: b"a" in (plant.connection.hget(plant.keys.info, "models") or b""))

    # If one after the other is asked for,
    for model in ("a", "b"):
        request = make_request(model=model)
        plant.push(request)
        assert plant.result(request.id).ok

    # I expect two loads, and that one gave way.
    assert reaches(leader, 2, "tokenyard_model_swaps_total")
    assert reaches(port, 2, "tokenyard_model_swap_seconds_count", phase="load")
    assert value(port, "tokenyard_model_swap_seconds_count", phase="unload") == 1


def test_own_counts_are_shown_without_redis(plant: Watched) -> None:
    port = free_port()
    nowhere = free_port()
    plant.coordinator(redis_url=f"redis://127.0.0.1:{nowhere}", metrics_port=port)

    assert value(port, "tokenyard_redis_up") == 0
    assert value(port, "tokenyard_requests_rejected_total", reason="QUEUE_FULL") == 0


def test_a_port_in_use_is_reported(plant: Watched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = plant.coordinator(metrics_port=port)
        assert program.wait() == 2
    assert f"Error: metrics_port: cannot listen at 127.0.0.1:{port}: " in program.log


def test_an_endpoint_ends() -> None:
    class Nothing:
        def collect(self) -> list[Any]:
            return []

    endpoint = Endpoint(Nothing(), Health(1.0), "127.0.0.1", free_port())
    endpoint.stop()
    endpoint.start()
    endpoint.stop()
    endpoint.stop()
    with pytest.raises(SettingsError, match="cannot listen"):
        Endpoint(Nothing(), Health(1.0), "256.0.0.1", 1).start()


def rows(heading: str) -> dict[str, tuple[str, ...]]:
    text = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n### ")[0]
    found = re.findall(r"^\| `(tokenyard_\w+)` \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    return {name: (kind, labels, meaning) for name, kind, labels, meaning in found}


@pytest.mark.parametrize(
    ("heading", "metrics"),
    [
        ("Coordinator", coordinator_metrics.METRICS),
        ("Controller", worker.host.metrics.METRICS),
        ("Gateway", gateway.metrics.METRICS),
    ],
)
def test_the_page_of_metrics_is_complete(heading: str, metrics: tuple[Metric, ...]) -> None:
    assert rows(heading) == {
        one.name: (one.kind, " ".join(f"`{label}`" for label in one.labels), one.help)
        for one in metrics
    }
    assert len({one.name for one in metrics}) == len(metrics)
    assert ", ".join(f"{bound:g}" for bound in BUCKETS_S) in PAGE.read_text()


def test_each_metric_is_on_grafanas_board() -> None:
    panels = json.loads((DEPLOY / "grafana" / "tokenyard.json").read_text())["panels"]
    queries = [query["expr"] for one in panels for query in one["targets"]]
    presence = {"tokenyard_worker_up", "tokenyard_leader", "tokenyard_redis_up"}
    assert OURS.keys() - set().union(*map(asked_for, queries)) == presence


@pytest.mark.long
def test_the_endpoints_show_the_declared_metrics(plant: Watched) -> None:
    ports = plant.lead(), plant.serve(simulated_step_s=0.05)
    plant.wait_for_leader()
    plant.wait_for_workers(1)
    plant.connection.zadd(plant.keys.service, {"ann": 1})
    with Client(plant.url, plant.keys.yard, result_timeout_s=30.0) as client:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        asked = client.submit([{"role": "user", "content": [picture]}], max_tokens=1).result()
        assert asked.ok, asked.error  # a prompt, and a medium
    plant.push_all(streams(1, 10_000))  # it runs, and so its model has a line
    eventually(lambda: "tokenyard_model_requests{" in text_of(ports[0]))
    for port, metrics in zip(ports, (coordinator_metrics.METRICS, worker.host.metrics.METRICS),
                             strict=True):  # fmt: skip
        families = list(text_string_to_metric_families(text_of(port)))
        shown = {
            (one.name + "_total" * (one.type == "counter"), one.type, one.documentation,
             frozenset(one.samples[0].labels.keys() - {"le"}))
            for one in families
        }  # fmt: skip
        assert shown == {(m.name, m.kind, m.help, frozenset(m.labels)) for m in metrics}
