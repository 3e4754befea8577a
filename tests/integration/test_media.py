"""Pictures on their way through a yard: they are there as long as their request, and no longer."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.support.processes import Plant
from tests.support.waiting import eventually
from tokenyard import Client, IdReused, InvalidRequest, RequestFailed
from tokenyard.client.build import RequestBuilder
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.media import MEDIA_TTL_S, decode_media, name_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def plant(redis_url: str, keys: Keys) -> Any:
    with Plant(redis_url, keys.yard) as plant:
        plant.coordinator()
        plant.wait_for_leader()
        yield plant


def said(content: bytes, text: str = "what") -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    picture = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


def client_of(plant: Plant) -> Client:
    return Client(plant.url, plant.keys.yard, client_id="ann", result_timeout_s=60.0)


def kept(connection: redis.Redis, keys: Keys, request_id: str) -> Any:
    return connection.get(keys.media("ann", request_id))


def test_media_are_kept_until_the_result(plant: Plant, connection: redis.Redis, keys: Keys) -> None:
    with client_of(plant) as client:
        handle = client.submit(said(b"one"), id="q")
        assert decode_media(kept(connection, keys, "q")) == {name_of(b"one"): b"one"}
        assert 0 < connection.ttl(keys.media("ann", "q")) <= MEDIA_TTL_S
        [(_, fields)] = connection.xrange(keys.intake("normal"))  # type: ignore[misc]
        assert len(str(fields)) < 1000
        assert name_of(b"one").encode() in fields[b"messages"]
        with pytest.raises(IdReused):
            client.submit(said(b"other"), id="q")
        assert decode_media(kept(connection, keys, "q")) == {name_of(b"one"): b"one"}
        client.submit(said(b"two"), id="cancelled")
        client.cancel("cancelled")
        assert kept(connection, keys, "cancelled") is None
        plant.worker()
        assert handle.result().ok
        assert kept(connection, keys, "q") is None
        again = client.submit(said(b"one"), id="q").result()
        assert again.text == handle.result().text
        assert kept(connection, keys, "q") is None
        other = client.submit(said(b"other")).result()
        assert other.text != again.text


def test_media_that_are_gone(plant: Plant, connection: redis.Redis, keys: Keys) -> None:
    with client_of(plant) as client:
        lost, torn = client.submit(said(b"one"), id="lost"), client.submit(said(b"one"), id="torn")
        connection.delete(keys.media("ann", "lost"))
        connection.set(keys.media("ann", "torn"), b"no map")
        plant.worker()
        with pytest.raises(RequestFailed, match="is not at the broker, or no longer"):
            lost.result()
        with pytest.raises(RequestFailed, match="media: cannot be read"):
            torn.result()


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, "data: URL"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "data: URL"),
        ({"type": "image_url", "image_url": {"url": "media:etc"}}, "data: URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "is not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "data: URL"),
        ({"type": "image_url"}, "is of type image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "data: URL"),
        ({"type": "image_embeds", "image_embeds": "x"}, "is of type image_embeds"),
        ({"type": "input_audio", "input_audio": {"data": 5}}, "is not base64"),
        ({"type": "image_url", "image_url": None, "uuid": "u"}, "uuid: leave it out"),
    ],
)
def test_what_is_no_picture(part: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        RequestBuilder("ann", None).prepare([{"role": "user", "content": [part]}], {})


def test_too_much() -> None:
    with pytest.raises(InvalidRequest, match="67108865 bytes, of at"):
        RequestBuilder("ann", None).prepare(said(bytes(64 * 1024 * 1024 + 1)), {})


def test_another_worker_finds_the_media_of_one_that_was_killed(
    plant: Plant, connection: redis.Redis, keys: Keys, kill_a_worker: Callable[[], None]
) -> None:
    plant.worker(slots=2, simulated_step_s=0.02)
    plant.wait_for_workers(2)
    with client_of(plant) as client:
        whole = client.submit(said(b"one"), max_tokens=100, id="whole").result()
        handles = [
            client.submit(said(b"one"), max_tokens=100, stream=True, id=f"q{number}")
            for number in range(8)
        ]
        eventually(lambda: connection.strlen(keys.tokens("ann", "q7")) > 0)
        kill_a_worker()
        assert {handle.result().text for handle in handles} == {whole.text}
    ledgers = [plant.ledger(f"q{number}", "ann") for number in range(8)]
    assert max(int(ledger["attempt"]) for ledger in ledgers) > 1
