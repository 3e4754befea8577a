"""What the probes of a container platform hear of live programs."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from http.client import HTTPException

import psutil
import pytest

from tests.support.processes import START_S, Plant
from tests.support.servers import free_port
from tests.support.waiting import eventually
from tokenyard import Client

MODELS = '[models.small]\npath = "org/small"\n'


def probe(port: int, path: str) -> tuple[int, str]:
    """Status and text of one probe; status 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode().strip()
    except (OSError, HTTPException):
        return 0, ""


def hears(port: int, path: str, status: int, text: str) -> bool:
    """Wait until a probe has this status, and this in its text."""

    def is_so() -> bool:
        found, said = probe(port, path)
        return found == status and text in said

    return eventually(is_so, timeout_s=START_S)


def test_a_coordinator_is_ready_while_it_leads_or_stands_by(plant: Plant) -> None:
    # Given one coordinator that leads and one that stands by
    ports = [free_port(), free_port()]
    for number, port in enumerate(ports):
        plant.coordinator(metrics_port=port, name=f"c{number}")

    # I expect both to be live and ready.
    for port in ports:
        assert hears(port, "/readyz", 200, "ok")
        assert hears(port, "/livez", 200, "ok")


@pytest.mark.long
def test_a_coordinator_that_hangs_is_not_live(plant: Plant) -> None:
    # Given a coordinator whose loop hangs, while its other threads run
    port = free_port()
    program = plant.coordinator(metrics_port=port, liveness_timeout_s=1, lease_ms=60_000)
    assert hears(port, "/livez", 200, "ok")

    # If its broker keeps it waiting for an answer that does not come,
    broker = psutil.Process(plant.connection.info("server")["process_id"])
    broker.suspend()

    # I expect its probe to say so, and to recover with it.
    try:
        assert hears(port, "/livez", 503, "no progress for")
    finally:
        broker.resume()
    assert hears(port, "/livez", 200, "ok")
    assert program.is_running


@pytest.mark.long
def test_a_host_is_ready_when_its_model_is_up(plant: Plant) -> None:
    # Given a host whose model takes as long as it likes to load
    port = free_port()
    plant.coordinator()
    plant.worker(metrics_port=port, simulated_load_s=3.0, simulated_step_s=0.01, grace_s=60)
    assert hears(port, "/readyz", 503, "no worker is ready: w is")
    assert hears(port, "/livez", 200, "ok")

    # I expect it to be ready with the model,
    plant.wait_for_workers(1)
    assert hears(port, "/readyz", 200, "ok")

    # and live but not ready while what runs may finish.
    with Client(plant.url, plant.keys.yard) as client:
        handle = client.submit([1], max_tokens=100_000, stream=True)
        next(iter(handle))
        plant.programs[-1].signal(signal.SIGTERM)
        assert hears(port, "/readyz", 503, "it is stopping")
        assert hears(port, "/livez", 200, "ok")
        handle.cancel()


def test_a_host_that_loads_on_demand_is_ready_without_a_model(plant: Plant) -> None:
    port = free_port()
    plant.host(plant.write("models.toml", MODELS), metrics_port=port)
    assert hears(port, "/readyz", 200, "ok")
