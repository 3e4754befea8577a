"""What cannot be done is refused before any 200, and what nobody waits for is cancelled."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import anthropic
import httpx
import httpx2
import openai
import pytest
from anthropic import Anthropic
from anthropic.types import ErrorResponse
from openai import OpenAI

from gateway.http.records import durable_id
from tests.conftest import SERVERS
from tests.gateway.asked import say
from tests.gateway.events import EventStream
from tests.gateway.speaker import write_speaker
from tests.gateway.stand import Door
from tests.support.builders import make_request, random_name
from tests.support.processes import Plant, Program
from tests.support.servers import Server, ServerName
from tests.support.waiting import eventually
from tokenyard.protocol.replies import decode_reply
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.yard.snapshot import read_yard

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
ENDPOINTS: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"messages": say("a")},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    MESSAGES: {"messages": say("a"), "max_tokens": 5},
}
SLOW: Final[dict[str, Any]] = {"model": "speaker", "messages": say("a"), "max_tokens": 900}
SLOW_RESPONSE: Final[dict[str, Any]] = {"model": "speaker", "input": "a", "max_output_tokens": 900}
ROOM: Final = 4


class Slow:
    """A yard with a simulated engine that takes its time, and room for few requests."""

    def __init__(self, plant: Plant, models: str) -> None:
        self.plant = plant
        path = plant.write("models.toml", models)
        self.coordinator = self._coordinator()
        plant.host(path, simulated_step_s=0.05)
        self.door = Door(plant, {"speaker"}, without_leader_s=5.0)

    def _coordinator(self) -> Program:
        return self.plant.coordinator(
            max_num_queued_reqs=ROOM, max_normal_share=1.0, lease_ms=15_000, max_held=2
        )

    def start_coordinator(self) -> None:
        self.coordinator = self._coordinator()
        self.plant.wait_for_leader()

    def waiting(self) -> int:
        """Requests in the intake."""
        return int(self.plant.connection.xlen(self.plant.keys.intake("normal")))

    def has_full_lane(self) -> bool:
        """Whether the worker takes no more."""
        [worker] = read_yard(self.plant).workers
        return worker.info is not None and worker.lane >= worker.info.lane_limit

    def cancel(self, asked: list[Request]) -> None:
        """Cancel requests, and wait until there is room again."""
        for request in asked:
            self.plant.scripts.cancel(request.client, request.id, "the test is over")
        eventually(lambda: not self.waiting(), timeout_s=60.0)

    def ids_of(self, name: str) -> list[str]:
        """The requests of an HTTP request on the queue."""
        found = self.plant.connection.scan_iter(match=f"*request:http/*{name}*", count=1000)
        return [key.decode().rpartition("http/")[2] for key in found]

    def results_of(self, name: str) -> set[str]:
        """How the requests of an HTTP request have ended."""
        plant, states = self.plant, set()
        for key in plant.connection.scan_iter(match=f"*request:http/*{name}*", count=1000):
            packed = plant.connection.hget(key, "result")
            states.add(decode_reply(packed).status or "" if packed else "")
        return states


@pytest.fixture(scope="module")
def slow(
    shared_server: Callable[[ServerName], Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Slow]:
    speaker = write_speaker(tmp_path_factory.mktemp("slow") / "speaker")
    models = f'[models.speaker]\npath = "{speaker}"\nmax_model_len = 1024\nmax_num_seqs = 1\n'
    with Plant(shared_server(SERVERS[0]).url) as plant:
        slow = Slow(plant, models)
        slow.door.wait()
        # A worker holds the model: else loading it would make room in a queue that was full.
        assert post(slow.door, CHAT, SLOW | {"max_tokens": 1}).status_code == 200
        yield slow


@pytest.fixture
def full(slow: Slow) -> Iterator[Slow]:
    """The yard with no room left."""
    params = SamplingParams(max_tokens=900)
    asked = [make_request(model="speaker", params=params) for _ in range(8 * ROOM)]
    # What comes before the lane is full may be cut to the bound, and then leave room for the lane.
    slow.plant.push_all(asked[: 4 * ROOM])
    eventually(slow.has_full_lane)
    slow.plant.push_all(asked[4 * ROOM :])
    eventually(lambda: slow.waiting() >= ROOM)
    yield slow
    slow.cancel(asked)


def post(door: Door, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{door.url}{path}", json=body, headers=given, timeout=60.0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_full_queue_refuses_before_the_head(full: Slow, path: str, stream: bool) -> None:
    refused = post(full.door, path, {"model": "speaker", "stream": stream, **ENDPOINTS[path]})

    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "true"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert (refused.json().get("type") == "error") is (path == MESSAGES)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_key_that_met_a_full_queue_is_free(full: Slow, path: str, stream: bool) -> None:
    key, body = random_name("key"), {"model": "speaker", "stream": stream, **ENDPOINTS[path]}
    for changed in ({}, {"temperature": 0.5}):
        refused = post(full.door, path, body | changed, Idempotency_Key=key)
        assert refused.status_code == 429, refused.text
        assert not full.plant.connection.exists(
            full.plant.keys.http_record("http", durable_id("http", key))
        )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_key_that_came_with_a_wrong_body_is_free(slow: Slow, path: str, stream: bool) -> None:
    # Given a value that the queue cannot carry, which vLLM lets pass: it has begun its stream
    key, body = random_name("key"), {"model": "speaker", "stream": stream, **ENDPOINTS[path]}
    wrong = {"top_k": 2**31}

    # If it comes with a key, I expect a refusal that says so,
    refused = post(slow.door, path, body | wrong, Idempotency_Key=key)
    assert refused.status_code == 400, refused.text
    assert "top_k" in refused.json()["error"]["message"]

    # and the key is free for the right body.
    answered = post(slow.door, path, body, Idempotency_Key=key)
    assert answered.status_code == 200, answered.text


def test_the_sdk_knows_a_full_queue_and_tries_again_by_itself(full: Slow) -> None:
    tries = []
    with httpx2.Client(event_hooks={"request": [tries.append]}) as http:
        sdk = OpenAI(
            base_url=f"{full.door.url}/v1", api_key="none", http_client=http, max_retries=1
        )
        with pytest.raises(openai.RateLimitError):
            sdk.chat.completions.create(**SLOW)

    assert len(tries) == 2


def test_a_connection_is_of_use_after_a_refusal(full: Slow) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", full.door.port, timeout=60)
    statuses = []
    for stream in (False, True, False, True):
        body = json.dumps(SLOW | {"stream": stream})
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        socket = connection.sock
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
        assert connection.sock is socket is not None
    connection.close()

    assert statuses == [429] * 4


@pytest.fixture(scope="module")
def rated(slow: Slow) -> Slow:
    """The yard, which knows how many requests it serves in a second: they had to wait."""
    plant, params = slow.plant, SamplingParams(max_tokens=10)

    def is_known() -> bool:
        short = [make_request(model="speaker", params=params) for _ in range(ROOM + 2)]
        plant.push_all(short)
        plant.results(short, timeout_s=60.0)
        return float(plant.connection.hget(plant.keys.info, "rate") or 0) > 0

    eventually(is_known, timeout_s=60.0)
    return slow


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_deadline_that_cannot_be_met_is_refused(rated: Slow, path: str) -> None:
    asked = []
    body = {"model": "speaker", "stream": True, **ENDPOINTS[path]}

    # If somebody has no time at all, I expect a refusal.
    def refused() -> bool:
        if rated.waiting() < ROOM - 1:
            asked.append(make_request(model="speaker", params=SamplingParams(max_tokens=900)))
            rated.plant.push(asked[-1])
        answer = post(rated.door, path, body, X_Request_Timeout_Ms="1")
        return answer.status_code == 503 and "come too late" in answer.text

    try:
        eventually(refused, timeout_s=60.0)
    finally:
        rated.cancel(asked)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_beam_search_is_refused(slow: Slow, path: str) -> None:
    body = {"model": "speaker", "use_beam_search": True, "max_tokens": 2, **ENDPOINTS[path]}
    refused = post(slow.door, path, body)

    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "use_beam_search"


def test_nobody_waits_for_an_answer_whose_client_has_left(slow: Slow) -> None:
    body = SLOW | {"stream": True}
    with EventStream(slow.door.port, CHAT, body, {}) as stream:
        next(iter(stream))
        name = stream.headers["x-request-id"]

    eventually(lambda: slow.results_of(name) == {"cancelled"})


def test_an_error_inside_a_stream_of_messages_is_one_that_the_sdk_reads(slow: Slow) -> None:
    # Given a stream that has begun
    with Anthropic(base_url=slow.door.url, api_key="none", max_retries=0) as sdk:
        stream = sdk.messages.create(
            model="speaker",
            max_tokens=900,
            messages=say("a"),
            stream=True,  # type: ignore[arg-type]
        )
        next(stream)
        name = stream.response.headers["request-id"]
        # If its request is cancelled by somebody else
        (request_id,) = slow.ids_of(name)
        slow.plant.scripts.cancel("http", request_id, "an operator was here")
        with pytest.raises(anthropic.APIStatusError) as ended:
            list(stream)
    # I expect the error in the SDK's form, with its reason.
    body = ErrorResponse.model_validate(ended.value.body)
    assert body.error.type == "invalid_request_error"
    assert "an operator was here" in body.error.message
    assert body.request_id == name


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, SLOW), ("/v1/responses", SLOW_RESPONSE)], ids=["chat", "response"]
)
def test_a_client_that_waits_for_the_whole_answer_may_leave_too(
    slow: Slow, path: str, body: dict[str, Any]
) -> None:
    logged = len(slow.door.program.log)
    key = random_name("request")
    name = durable_id("http", key)
    headers = {"Idempotency-Key": key, "X-Tokenyard-On-Disconnect": "cancel"}
    headers["Content-Type"] = "application/json"
    connection = http.client.HTTPConnection("127.0.0.1", slow.door.port, timeout=60)
    connection.request("POST", path, json.dumps(body), headers)
    eventually(lambda: slow.ids_of(name))
    connection.close()

    eventually(lambda: slow.results_of(name) == {"cancelled"})
    # The one answer that is open then is this one.
    eventually(lambda: "tokenyard_http_open 1.0" in httpx.get(f"{slow.door.url}/metrics").text)
    assert "Traceback" not in slow.door.program.log[logged:]


@pytest.mark.parametrize(
    "headers", [{"X-Tokenyard-On-Disconnect": "continue"}, {"Idempotency-Key": "goes-on"}], ids=str
)
def test_client_may_leave_by_header_and_the_answer_is_made(
    slow: Slow, headers: dict[str, str]
) -> None:
    body = SLOW | {"stream": True, "max_tokens": 40}
    with EventStream(slow.door.port, CHAT, body, headers) as stream:
        next(iter(stream))
        name = stream.headers["x-request-id"]

    eventually(lambda: slow.results_of(name) == {"completed"})


def test_without_a_coordinator_nothing_is_promised(slow: Slow) -> None:
    # Given a yard whose only coordinator is dead
    slow.coordinator.kill()
    slow.plant.connection.delete(slow.plant.keys.leader)
    try:
        # If requests come, I expect a refusal once the gateway is sure
        def refused() -> bool:
            answer = post(slow.door, CHAT, SLOW, X_Request_Timeout_Ms="500")
            assert answer.status_code in {503, 504}, answer.text
            return bool(answer.json()["error"]["code"] == "NO_COORDINATOR")

        eventually(refused, timeout_s=60.0, every_s=0.5)
        assert httpx.get(f"{slow.door.url}/health", timeout=10.0).status_code == 503
    finally:
        slow.start_coordinator()

    # and answers again under the next leader.
    def answered() -> bool:
        return post(slow.door, CHAT, SLOW | {"max_tokens": 2}).status_code == 200

    eventually(answered, timeout_s=60.0, every_s=0.2)
