"""A gateway that stops leaves nothing behind that another one cannot continue."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from threading import Semaphore
from typing import Any, Final

import anthropic
import httpx
import httpx2
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.gateway.asked import say
from tests.gateway.events import EventStream, id_of
from tests.gateway.stand import NAMES, Door, Stand
from tests.gateway.test_once import runs
from tests.support.builders import random_name
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.crash, pytest.mark.timeout(600)]

#: A grace period that no test waits for.
LONG_S: Final = 3600.0
LENGTH: Final = 900
_COMMON: Final[dict[str, Any]] = {"model": "speaker", "temperature": 0}
WHOLE: Final = _COMMON | {"prompt": "abc", "max_tokens": LENGTH}
STREAMS: Final[Mapping[str, dict[str, Any]]] = {
    "/v1/completions": WHOLE | {"stream": True},
    "/v1/chat/completions": _COMMON
    | {"messages": say("abc"), "max_tokens": LENGTH, "stream": True},
    "/v1/responses": _COMMON | {"input": "abc", "max_output_tokens": LENGTH, "stream": True},
}
CASES: Final = [(path, has_key) for path in STREAMS for has_key in (True, False)]


@dataclass
class Stream:
    """A stream that the gateway did not finish."""

    path: str
    headers: dict[str, str]
    undisturbed: list[bytes]
    events: list[bytes] = field(default_factory=list)
    retry_ms: int | None = None

    def read(self, port: int, has_begun: Semaphore) -> None:
        """Read until the connection is lost."""
        with EventStream(port, self.path, STREAMS[self.path], self.headers) as stream:
            assert stream.status == 200, stream.body()
            try:
                for event in stream:
                    self.events.append(event)
                    if len(self.events) == 3:
                        has_begun.release()
            except ConnectionError:
                self.retry_ms = stream.retry_ms


@dataclass
class Stop:
    """What was seen of a gateway that was stopped with answers under way."""

    streams: dict[tuple[str, bool], Stream]
    key: str  # of the answer that is not a stream
    runs: int
    cancelled: int  # before
    whole: dict[bool, httpx.Response]  # by whether it had a key
    errors: list[BaseException | None]  # of the SDKs
    probes: dict[str, httpx.Response]
    kept_alive: tuple[int, Mapping[str, str]]
    answered: int  # before the grace period ended
    status: int


def stream(stand: Stand, path: str, *, has_key: bool) -> Stream:
    """A stream to ask for again, with its undisturbed bytes; the queue has forgotten them."""
    headers = {"Idempotency-Key": random_name("key")} if has_key else {}
    with EventStream(stand.door(1).port, path, STREAMS[path], headers) as one:
        assert one.status == 200, one.body()
        undisturbed = list(one)
    name = id_of(undisturbed[0]).partition(":")[0]
    stand.forget(name)
    # Without a key, only the id of an event leads to the same ids and times.
    return Stream(path, headers or {"Last-Event-ID": f"{name}:0"}, undisturbed)


def ask(port: int, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    url = f"http://127.0.0.1:{port}/v1/completions"
    return httpx.post(url, json=WHOLE, headers=headers, timeout=90.0)


def count_cancelled(stand: Stand) -> int:
    """Requests of gateways that were cancelled so far."""
    connection = stand.plant.connection
    pattern = f"{stand.plant.keys.ledger('http', '')}*"
    ledgers = connection.scan_iter(match=pattern, count=1000)
    return [connection.hget(one, "state") for one in ledgers].count(b"cancelled")


def read_by_openai(port: int, has_begun: Semaphore) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as sdk:
        options: Any = STREAMS["/v1/chat/completions"]
        for number, _ in enumerate(sdk.chat.completions.create(**options)):
            if number == 3:
                has_begun.release()


def read_by_anthropic(port: int, has_begun: Semaphore) -> None:
    with Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as sdk:
        asked: Any = {"model": "speaker", "max_tokens": LENGTH, "messages": say("abc")}
        asked["extra_body"] = {"temperature": 0}
        for number, _ in enumerate(sdk.messages.create(**asked, stream=True)):
            if number == 5:
                has_begun.release()


@contextmanager
def own_door(stand: Stand, *, grace_s: float, is_forked: bool = True) -> Iterator[Door]:
    """A gateway that only this test stops."""
    door = Door(stand.plant, set(NAMES), is_forked=is_forked, grace_s=grace_s)
    door.wait()
    yield door
    door.program.end()


def health(door: Door) -> httpx.Response:
    return httpx.get(f"{door.url}/health", timeout=60.0)


@pytest.fixture(scope="module")
def stop(stand: Stand) -> Iterator[Stop]:
    with (
        own_door(stand, grace_s=LONG_S, is_forked=False) as door,
        ThreadPoolExecutor(16) as pool,
    ):
        made = pool.map(lambda case: stream(stand, case[0], has_key=case[1]), CASES)
        streams = dict(zip(CASES, made, strict=True))
        key, has_begun = random_name("key"), Semaphore(0)
        idle = HTTPConnection("127.0.0.1", door.port, timeout=30)
        idle.request("GET", "/livez")
        assert idle.getresponse().read() == b"{}"

        # Given streams, and answers that are no streams, under way on one gateway,
        before, cancelled = runs(stand), count_cancelled(stand)
        with stand.stopped_worker():  # so that none is over before the last one has begun
            whole = {
                one: pool.submit(ask, door.port, key if one else None) for one in (True, False)
            }
            reading = [pool.submit(one.read, door.port, has_begun) for one in streams.values()]
            sdks = [
                pool.submit(read, door.port, has_begun)
                for read in (read_by_openai, read_by_anthropic)
            ]
            asked = before + len(whole) + len(reading) + len(sdks)
            eventually(lambda: runs(stand) == asked)
        for _ in (*reading, *sdks):
            assert has_begun.acquire(timeout=60)
        # if it is stopped, its worker does not finish them meanwhile, and nobody waits for that,
        with stand.stopped_worker():
            door.program.signal(signal.SIGTERM)
            eventually(lambda: health(door).status_code == 503)
            probes = {"/health": health(door)}
            probes["/livez"] = httpx.get(f"{door.url}/livez", timeout=60.0)
            probes["new"] = httpx.post(f"{door.url}/v1/completions", json=WHOLE, timeout=60.0)
            idle.request("GET", "/v1/models")
            answer = idle.getresponse()
            kept_alive = answer.status, {name.lower(): value for name, value in answer.getheaders()}
            answered = sum(one.done() for one in (*whole.values(), *reading, *sdks))
            door.program.signal(signal.SIGTERM)
            status = door.program.wait()
        # the tests expect what is kept here.
        for one in reading:
            one.result(30)
        yield Stop(
            streams=streams,
            key=key,
            cancelled=cancelled,
            runs=asked,
            whole={each: future.result(30) for each, future in whole.items()},
            errors=[one.exception(30) for one in sdks],
            probes=probes,
            kept_alive=kept_alive,
            answered=answered,
            status=status,
        )


@pytest.mark.parametrize(("path", "has_key"), CASES)
def test_a_stream_ends_with_a_hint_and_goes_on_at_another_gateway(
    stop: Stop, other_door: Door, path: str, has_key: bool
) -> None:
    one = stop.streams[path, has_key]
    assert 3 <= len(one.events) < len(one.undisturbed)
    assert one.retry_ms is not None

    headers = one.headers | {"Last-Event-ID": id_of(one.events[-1])}
    with EventStream(other_door.port, path, STREAMS[path], headers) as rest:
        assert rest.status == 200, rest.body()
        assert b"".join([*one.events, *rest]) == b"".join(one.undisturbed)
        assert rest.retry_ms is None


def test_an_sdk_does_not_take_a_part_for_the_whole(stop: Stop) -> None:
    by_openai, by_anthropic = stop.errors
    assert isinstance(by_openai, openai.APIConnectionError)
    assert isinstance(by_anthropic, anthropic.APIConnectionError | httpx2.TransportError)


@pytest.mark.parametrize("has_key", [True, False])
def test_what_is_no_stream_is_503_after_the_grace_period(stop: Stop, has_key: bool) -> None:
    refused = stop.whole[has_key]
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "true"
    assert refused.headers["connection"] == "close"


def test_the_key_of_a_503_leads_to_the_answer(stop: Stop, stand: Stand, other_door: Door) -> None:
    answer = ask(other_door.port, stop.key)

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == LENGTH
    assert runs(stand) == stop.runs


def test_only_what_nobody_can_ask_for_again_is_cancelled(stop: Stop, stand: Stand) -> None:
    eventually(lambda: count_cancelled(stand) == stop.cancelled + 1, timeout_s=60.0)


def test_probes_and_clients_are_told_at_once(stop: Stop) -> None:
    assert stop.probes["/health"].status_code == 503
    assert stop.probes["/livez"].status_code == 200
    assert stop.probes["new"].status_code == 503
    status, headers = stop.kept_alive
    assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
    assert {one.headers["connection"] for one in stop.probes.values()} == {"close"}


def test_nothing_is_cut_off_before_the_grace_period_ends(stop: Stop) -> None:
    assert stop.answered == 0
    assert stop.status == 0


def test_the_grace_period_has_an_end(stand: Stand) -> None:
    path, grace_s = "/v1/completions", 1.0
    with own_door(stand, grace_s=grace_s) as door:
        with EventStream(door.port, path, STREAMS[path]) as one:
            events = iter(one)
            next(events)
            with stand.stopped_worker():
                began = time.monotonic()
                door.program.signal(signal.SIGTERM)
                assert door.program.wait() == 0
                assert time.monotonic() - began >= grace_s
            with pytest.raises(ConnectionError):
                list(events)

        assert one.retry_ms is not None


def test_answers_may_finish(stand: Stand) -> None:
    path = "/v1/completions"
    with own_door(stand, grace_s=LONG_S) as door:
        with EventStream(door.port, path, STREAMS[path]) as one:
            events = iter(one)
            next(events)
            door.program.signal(signal.SIGTERM)
            last = list(events)[-1]

        assert last.endswith(b"data: [DONE]\n\n")
        assert one.retry_ms is None
        assert door.program.wait() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(stand: Stand, second: signal.Signals) -> None:
    path = "/v1/completions"
    with own_door(stand, grace_s=LONG_S) as door:
        with EventStream(door.port, path, STREAMS[path]) as one:
            events = iter(one)
            next(events)
            with stand.stopped_worker():
                door.program.signal(signal.SIGTERM)
                eventually(lambda: health(door).status_code == 503)
                assert door.program.is_running
                door.program.signal(second)
                assert door.program.wait() == 0
            with pytest.raises(ConnectionError):
                list(events)

        assert one.retry_ms is not None
