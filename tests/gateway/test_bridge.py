"""Real front ends of vLLM with a bridge: what clients get, and what they get when all dies."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.bridge import write_model
from tests.support.builders import make_request
from tests.support.processes import Plant, Program
from tests.support.servers import Server
from tests.support.streams import expected
from tests.support.vllm_rs import vllm_rs
from tests.support.waiting import eventually
from tokenyard.process.embedded_broker import free_port
from tokenyard.protocol.wire import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

#: vLLM's front end in Python takes long to start beside other tests.
START_S = 300

#: "vllm" is the one that is installed.
FRONTS = ["0.31.0", "0.32.0", "0.33.0", "vllm"]
STEP_S = 0.05
LONG = 60


@dataclass
class Heard:
    """A stream as its client has it."""

    texts: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class Door:
    """A front end with its bridge, as one unit."""

    def __init__(self, plant: Plant, front: str, model: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        rest = {"": model, "host": "127.0.0.1", "port": port}  # behind "--"
        self.unit: Program = plant._start(
            "gateway.bridge", {"front": front, "model": "sim", "metrics_port": 0} | rest
        )
        eventually(self.is_up, timeout_s=START_S)

    def is_up(self) -> bool:
        """Whether it answers."""
        return not self.hear("w1", 1).error

    def processes(self) -> dict[str, psutil.Process]:
        """The front end and the bridge."""
        found = psutil.Process(self.unit.pid).children()
        is_front = [
            any("--data-parallel-rpc-port" in word for word in one.cmdline()) for one in found
        ]
        return {
            "front end" if is_one else "bridge": one
            for one, is_one in zip(found, is_front, strict=True)
        }

    def kill(self, *names: str) -> None:
        """Kill some of its processes."""
        found = self.processes()
        for name in names:
            os.kill(found[name].pid, signal.SIGKILL)

    def post(self, path: str, body: dict[str, Any], name: str = "") -> Any:
        """An answer of the front end."""
        headers = {"content-type": "application/json", **({"X-Request-Id": name} if name else {})}
        data = json.dumps({"model": "sim", "temperature": 0, **body}).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        return urllib.request.urlopen(request, timeout=60)

    def hear(self, prompt: str, tokens: int, name: str = "", into: Heard | None = None) -> Heard:
        """A stream, to its end or its error."""
        heard = into or Heard()
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        try:
            with self.post("/v1/completions", body, name) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        heard.error = heard.error or str(event.get("error") or "")
                        heard.texts += [one["text"] for one in event.get("choices", ())]
                    elif line.startswith(b"data: [DONE]"):
                        return heard
            heard.error = heard.error or "it was cut"
        except urllib.error.HTTPError as error:
            with error:
                heard.error = error.read().decode()
        except OSError as error:
            heard.error = repr(error)
        return heard


@pytest.fixture
def plant(broker: Server) -> Iterator[Plant]:
    with Plant(broker.url) as started:
        yield started


@pytest.fixture(params=FRONTS)
def door(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Door:
    version = request.param
    if version != "vllm":
        monkeypatch.setenv("PATH", f"{vllm_rs(version)}{os.pathsep}{os.environ['PATH']}")
    plant.up(slots=2, simulated_step_s=STEP_S)
    return Door(plant, "vllm" if version == "vllm" else "vllm-rs", write_model(tmp_path))


def said(number: int, tokens: int) -> str:
    """What an undisturbed engine says to a prompt."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    made = expected(make_request(tokens=[number, 7], params=params))
    return " ".join(f"w{token}" for token in made)


def test_answers_are_those_of_the_queue(door: Door, plant: Plant) -> None:
    body = {"prompt": "w5 w7", "max_tokens": 8, "ignore_eos": True}
    with door.post("/v1/completions", body) as answer:
        told = json.load(answer)
    assert told["choices"][0]["text"].split() == said(5, 8).split()
    assert told["usage"]["completion_tokens"] == 8
    assert door.hear("w5 w7", 8).text.split() == said(5, 8).split()
    # A body says no more who asks than the header does.
    name, forged = "~acme~low~~~idem-a", "~evil~low~~~idem-a"
    with door.post("/v1/completions", {**body, "request_id": forged}, name) as answer:
        answer.read()
    ledgers = [
        list(plant.connection.scan_iter(plant.keys.ledger(client, "*")))
        for client in ("http.acme", "http.evil")
    ]
    assert list(map(len, ledgers)) == [1, 0]


def test_a_refusal_of_the_queue_is_an_error(door: Door) -> None:
    body = {"prompt": "w5", "max_tokens": 3, "kv_transfer_params": {"host": "x"}}
    with pytest.raises(urllib.error.HTTPError) as refused:
        door.post("/v1/completions", body)
    with refused.value:
        assert refused.value.code in {400, 500}
    assert door.is_up()


@pytest.mark.parametrize("victims", [("bridge",), ("front end",), ("bridge", "front end")])
def test_streams_end_and_those_with_a_name_begin_with_what_was_seen(
    door: Door, plant: Plant, victims: tuple[str, ...]
) -> None:
    heard = [Heard() for _ in range(8)]
    threads = [
        threading.Thread(
            target=door.hear,
            args=(f"w{at + 1} w7", LONG, f"idem-{at}" if at % 2 else f"other-{at}", heard[at]),
        )
        for at in range(len(heard))
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: all(one.texts for one in heard))
    door.kill(*victims)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a stream hangs"
    assert all(one.error for one in heard), "none can have come to its end"
    eventually(door.is_up, timeout_s=START_S)
    for at in range(1, len(heard), 2):
        again = door.hear(f"w{at + 1} w7", LONG, f"idem-{at}")
        assert not again.error
        assert again.text.split() == said(at + 1, LONG).split()
        assert again.text.startswith(heard[at].text)
    ledgers = [
        plant.connection.hget(key, "attempt")
        for key in plant.connection.scan_iter(plant.keys.ledger("http", "*idem-*"))
    ]
    assert ledgers == [b"1"] * 4, "none was generated twice"
