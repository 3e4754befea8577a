"""Traces: one for each request, from the process that asks to the process that answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.builders import make_request
from tests.support.otlp import Receiver, receiver
from tests.support.processes import Plant
from tokenyard import Client
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.parse import unfold
from tokenyard.protocol.texts import pip_install
from tokenyard.protocol.wire import Request
from tokenyard.telemetry.tracing import Tracer, carrier_of

#: Asks as a program does that has set OpenTelemetry up, inside a span of its own.
ASKER = """
import sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tokenyard import Client

url, yard, endpoint = sys.argv[1:]
provider = TracerProvider(resource=Resource.create({"service.name": "asker"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint + "/v1/traces")))
trace.set_tracer_provider(provider)
with Client(url, yard) as client:
    with trace.get_tracer("asker").start_as_current_span("question"):
        handle = client.submit([1, 2, 3], id="q1", max_tokens=60, stream=True)
    for _ in handle:
        print("token", flush=True)
provider.shutdown()
"""
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def sink() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


def start(plant: Plant, sink: Receiver, **worker: object) -> None:
    # A batch of spans is sent at the latest when its process ends.
    plant.coordinator(otlp_endpoint=sink.url)
    plant.worker(otlp_endpoint=sink.url, simulated_step_s=0.01, **worker)
    plant.wait_for_leader()
    plant.wait_for_workers(1)


def ask(plant: Plant, sink: Receiver) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ASKER, plant.url, plant.keys.yard, sink.url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stop(plant: Plant) -> None:
    for program in reversed(plant.programs):
        program.signal(signal.SIGTERM)
    assert {program.wait() for program in plant.programs} == {0}


def traced(**values: Any) -> Request:
    return make_request(metadata={"traceparent": TRACEPARENT}, **values)


@pytest.mark.long
def test_a_trace_leads_from_the_client_to_the_engine(plant: Plant, sink: Receiver) -> None:
    # Given a program, a coordinator and a worker that send their spans to one place
    start(plant, sink)

    # If the program asks, within a span of its own,
    asker = ask(plant, sink)
    assert asker.communicate(timeout=60)[0].count("token") > 1
    stop(plant)

    # I expect one trace: the client's span is the parent,
    (question,) = sink.of("asker", "question")
    (sent,) = sink.of("asker", f"send {plant.keys.yard}")
    assert (sent.kind, sent.parent) == ("PRODUCER", question.id)
    assert sent.attributes["tokenyard.submission"] == "ACCEPTED"
    # and its wait and its run are parts of that,
    (waited,) = sink.of("tokenyard-coordinator")
    (ran,) = sink.of("tokenyard-worker")
    assert {one.trace for one in (sent, waited, ran)} == {question.trace}
    assert (waited.kind, waited.parent) == ("INTERNAL", sent.id)
    assert (ran.kind, ran.parent) == ("CONSUMER", sent.id)
    # in the words that OpenTelemetry has for both.
    assert waited.attributes["messaging.message.id"] == "q1"
    assert waited.attributes["tokenyard.worker"] == ran.attributes["tokenyard.worker"]
    assert ran.name == "text_completion sim"
    assert (ran.attributes["gen_ai.operation.name"], ran.attributes["tokenyard.attempt"]) == (
        "text_completion",
        1,
    )
    assert ran.attributes["gen_ai.request.model"] == "sim"
    assert ran.attributes["gen_ai.request.max_tokens"] == 60
    assert ran.attributes["gen_ai.usage.input_tokens"] == 3
    assert ran.attributes["gen_ai.usage.output_tokens"] == 60
    assert ran.attributes["gen_ai.response.finish_reasons"] == ["length"]
    # The first token lies between begin and end.
    first_s = ran.attributes["gen_ai.server.time_to_first_token"]
    assert ran.start_s < ran.events["first token"] < ran.end_s
    assert ran.events["first token"] - ran.start_s == pytest.approx(first_s, abs=0.001)


@pytest.mark.long
def test_the_next_attempt_is_in_the_same_trace(plant: Plant, sink: Receiver) -> None:
    # Given a request whose first tokens have been read
    start(plant, sink)
    asker = ask(plant, sink)
    assert asker.stdout
    assert asker.stdout.readline() == "token\n"

    # If its worker is killed,
    (worker,) = plant.roster().values()
    psutil.Process(worker.pid).kill()
    asker.communicate(timeout=60)
    assert asker.returncode == 0
    stop(plant)

    # I expect the second attempt and its wait under the same span of the client.
    (sent,) = sink.of("asker", f"send {plant.keys.yard}")
    (ran,) = sink.of("tokenyard-worker")
    assert (ran.trace, ran.parent) == (sent.trace, sent.id)
    assert ran.attributes["tokenyard.attempt"] == 2
    waits = sink.of("tokenyard-coordinator")
    assert {(one.trace, one.parent) for one in waits} == {(sent.trace, sent.id)}
    assert [one.attributes["tokenyard.is_retry"] for one in waits] == [False, True]


@pytest.mark.long
def test_a_failed_span_has_its_error(plant: Plant, sink: Receiver) -> None:
    # Given a request that waits for a worker until its deadline, and one that the worker refuses
    plant.coordinator(otlp_endpoint=sink.url)
    plant.wait_for_leader()
    late = traced(deadline_ms=int(time.time() * 1000) + 4000)
    wrong = traced(tokens=[1] * 9000)
    plant.push_all([late])
    plant.results([late])
    plant.worker(otlp_endpoint=sink.url)
    plant.push_all([wrong])
    plant.results([wrong])
    stop(plant)

    (waited,) = (one for one in sink.of("tokenyard-coordinator") if one.error)
    (ran,) = sink.of("tokenyard-worker")
    assert waited.error == "DEADLINE_EXCEEDED"
    assert ran.error.startswith("INVALID_REQUEST: ")
    assert {waited.parent, ran.parent} == {"b7ad6b7169203331"}


@pytest.mark.long
@pytest.mark.parametrize("parent", [None, 7, "", "00-rubbish", {"traceparent": 1}])
def test_an_unreadable_traceparent_is_ignored(plant: Plant, sink: Receiver, parent: object) -> None:
    # Given processes that trace, and requests with and without a trace
    start(plant, sink)
    request = make_request(metadata={"traceparent": parent})
    good = traced()
    plant.push_all([request, good])

    # I expect all answered, and the spans of that which has one.
    assert all(result.ok for result in plant.results([request, good]))
    stop(plant)
    assert len(sink.of("tokenyard-coordinator")) == len(sink.of("tokenyard-worker")) == 1


@pytest.mark.long
def test_unsampled_requests_are_not_traced(plant: Plant, sink: Receiver) -> None:
    # Given a client that has decided against it by the last byte
    start(plant, sink)
    request = make_request(metadata={"traceparent": TRACEPARENT[:-1] + "0"})
    plant.push(request)
    plant.result(request.id)
    stop(plant)

    assert sink.spans == []


def test_without_opentelemetry_a_client_sends_nothing_more(plant: Plant) -> None:
    # Given a program that has set nothing up, and one whose request has a trace of its own
    plant.coordinator()
    plant.wait_for_leader()
    with Client(plant.url, plant.keys.yard, client_id="me") as client:
        client.submit([1], id="plain")
        client.submit([1], id="own", metadata={"traceparent": TRACEPARENT})

    entries: Any = plant.connection.xrange(plant.keys.intake("normal"))
    plain, own = [unfold(fields) for _, fields in entries]
    assert b"metadata" not in plain
    assert msgspec.json.decode(own[b"metadata"]) == {"traceparent": TRACEPARENT}


@pytest.mark.long
def test_variables_of_opentelemetry_are_used(plant: Plant, sink: Receiver) -> None:
    # Given a coordinator that has the collector from the variable alone
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = sink.url
    try:
        plant.coordinator()
    finally:
        del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    plant.worker()
    request = traced()
    plant.push(request)
    plant.result(request.id)
    stop(plant)

    (waited,) = sink.spans
    assert waited.service == "tokenyard-coordinator"


@pytest.mark.long
def test_an_unreachable_collector_delays_nothing(plant: Plant) -> None:
    # Given spans for a collector that does not listen
    plant.coordinator(otlp_endpoint="http://127.0.0.1:9")
    plant.worker(otlp_endpoint="http://127.0.0.1:9")
    request = traced()
    plant.push(request)
    assert plant.result(request.id).ok
    # I expect both to end in order all the same.
    stop(plant)


def test_tracing_without_its_extra_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenyard.telemetry.tracing._is_installed", lambda: False)
    with pytest.raises(SettingsError, match=r"otlp_endpoint: .*PATH\[tracing\]"):
        Tracer("", "", "http://127.0.0.1:9").start()

    # Variables may be meant for others.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracer = Tracer("", "")
    tracer.start()
    assert not tracer.is_on


#: Runs a program where neither extra is installed.
BARE = """
import sys
sys.modules["opentelemetry"] = sys.modules["prometheus_client"] = None
program, *sys.argv[1:] = sys.argv[1:]
if program == "client":
    from tokenyard import Client
    with Client(*sys.argv[1:]) as client:
        print(client.submit([1], max_tokens=3).result().status)
else:
    from importlib import import_module
    import_module(f"{program}.__main__").main()
"""


def bare(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BARE, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_yard_needs_neither_extra(plant: Plant) -> None:
    # Given a coordinator that has neither, and a worker
    with bare("coordinator", "--redis-url", plant.url, "--yard", plant.keys.yard) as coordinator:
        plant.worker()

        # I expect a client that has neither to get its answer.
        with bare("client", plant.url, plant.keys.yard) as client:
            assert client.communicate(timeout=60)[0] == "completed\n"
        coordinator.terminate()
        assert coordinator.wait(timeout=30) == 0


@pytest.mark.long
@pytest.mark.parametrize("program", ["coordinator", "worker"])
@pytest.mark.parametrize(
    ("option", "value", "extra"),
    [("--metrics-port", "9", "metrics"), ("--otlp-endpoint", "http://127.0.0.1:9", "tracing")],
)
def test_a_missing_extra_is_named(
    plant: Plant, program: str, option: str, value: str, extra: str
) -> None:
    more = ["--engine", "simulated"] if program == "worker" else []
    arguments = [program, "--redis-url", plant.url, option, value, *more]
    with bare(*arguments) as process:
        _, said = process.communicate(timeout=60)

    name = option.strip("-").replace("-", "_")
    assert said == f"Error: {name}: needs more: {pip_install(extra)}\n"
    assert process.returncode == 2


def test_a_carrier_contains_text() -> None:
    assert carrier_of({"traceparent": "a", "tracestate": "b", "more": 1}) == {
        "traceparent": "a",
        "tracestate": "b",
    }
    assert carrier_of({"tracestate": "b"}) == {}
