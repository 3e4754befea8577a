"""What bad input gets, and who notices: nobody.

A tenant sends what `BadInput` draws, while another one streams.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPResponse
from itertools import chain
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from tests.conftest import SERVERS
from tests.gateway.bad_input import GOOD, BadInput, Sent
from tests.gateway.forked import ForkedGateway
from tests.gateway.speaker import write_speaker
from tests.gateway.stand import Door
from tests.gateway.test_fuzz import check_stream
from tests.support.api_keys import create_key
from tests.support.processes import Plant, Program
from tests.support.servers import Server
from tokenyard.protocol.gateway_settings import GatewaySettings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(5400)]

#: What may keep the event loop from its next request; see `stalls`. Wanted is 0.05: docs/gateway.md
#: has the figures. A busy machine makes CPU time longer, too.
LONGEST_S: Final = 0.15
#: By which the gateway's memory may grow. Wanted are 300 MiB, but two large bodies may meet.
MOST_BYTES: Final = 384 * 2**20
#: Tokens of the model's context: enough for a tokenizer to see the most of a body.
CONTEXT: Final = 131_072
#: Tokens of an answer at most, by the model's `generation_config.json`.
TOKENS: Final = 64
#: Clients that send what is bad, and streams beside them, at a time.
AT_ONCE: Final = 2
STREAMS: Final = 2
#: A refusal by one of these is the answer to a request that set itself a time.
LATE: Final = {503, 504}
MOST_FAULTS: Final = 40


@dataclass
class Pasture:
    """A yard with a simulated engine, and a gateway with keys."""

    plant: Plant
    door: Door
    evil: str
    neighbour: str

    @property
    def program(self) -> ForkedGateway:
        assert isinstance(self.door.program, ForkedGateway)
        return self.door.program

    def post(self, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
        """Ask, and have an answer."""
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{self.door.url}{path}", json=body, headers=headers, timeout=120.0)
        assert answer.is_success, answer.text
        return answer


@pytest.fixture(scope="module")
def pasture(
    shared_server: Callable[[str], Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pasture]:
    folder = tmp_path_factory.mktemp("pasture")
    path = write_speaker(folder / "speaker")
    config = path / "config.json"
    longer = {"max_position_embeddings": CONTEXT}
    config.write_text(json.dumps(json.loads(config.read_text()) | longer))
    (path / "generation_config.json").write_text(json.dumps({"max_new_tokens": TOKENS}))
    models = f"""
[models.speaker]
path = "{path}"
max_model_len = {CONTEXT}
serve_args.enable_auto_tool_choice = true
serve_args.tool_call_parser = "hermes"
"""
    with Plant(shared_server(SERVERS[0]).url) as plant:
        keys = [create_key(plant, name)[0] for name in ("evil", "neighbour")]
        plant.coordinator(lease_ms=15_000)
        plant.host(plant.write("models.toml", models), simulated_step_s=0.005)
        options = {"keys": "required", "files_dir": folder / "files", "record_ttl_s": 60}
        options["without_leader_s"] = 60.0  # a machine may be busy with something else
        door = Door(plant, {"speaker"}, **options)
        made = Pasture(plant, door, *keys)
        door.wait(key=made.evil)
        for path_, body in GOOD.items():  # what is made for the first request stays
            without = {name: body[name] for name in body if name != "structured_outputs"}
            made.post(made.evil, path_, without)
        yield made


@dataclass
class Watch:
    """What others notice while bad input comes."""

    pasture: Pasture
    expected: list[int]
    is_over: threading.Event = field(default_factory=threading.Event)
    faults: list[str] = field(default_factory=list)
    streams: int = 0
    #: Times of probes by the clock on the wall, which tell of the machine and of this process as
    #: well, so they are reported, and nothing depends on them.
    live_s: list[float] = field(default_factory=list)

    def stream(self) -> None:
        """A neighbour's streams, one after the other, each with all its tokens and its end."""
        headers = {"Authorization": f"Bearer {self.pasture.neighbour}"}
        with httpx.Client(base_url=self.pasture.door.url, headers=headers, timeout=120.0) as client:
            while not self.is_over.is_set():
                try:
                    answer = client.post("/v1/completions", json=STREAM | {"stream": True})
                    *events, end = re.findall("^data: (.*)$", answer.text, re.MULTILINE)
                    pieces = [json.loads(one)["choices"][0]["token_ids"] for one in events]
                    assert (end, [*chain(*pieces)]) == ("[DONE]", self.expected)
                except Exception as error:  # noqa: BLE001 - what breaks a stream is the test's result
                    self.faults.append(f"a stream of the neighbour's: {error!r}")
                    return
                self.streams += 1

    def probe(self) -> None:
        """Ask now and then whether the gateway lives."""
        command = [sys.executable, "-m", "tests.gateway.live_probe", str(self.pasture.door.port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as prober:
            self.is_over.wait()
            told, _ = prober.communicate()
        if prober.returncode:
            self.faults.append("/livez was not answered with 200: see standard error")
        else:
            self.live_s = json.loads(told)


STREAM: Final[dict[str, Any]] = {
    "model": "speaker",
    "prompt": "abc",
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "seed": 1,
    "return_token_ids": True,
}


@contextlib.contextmanager
def watched(pasture: Pasture) -> Iterator[Watch]:
    """Others beside the block."""
    whole = pasture.post(pasture.neighbour, "/v1/completions", STREAM).json()
    watch = Watch(pasture, whole["choices"][0]["token_ids"])
    assert len(watch.expected) == TOKENS
    works = [*[watch.stream] * STREAMS, watch.probe]
    threads = [threading.Thread(target=work) for work in works]
    for one in threads:
        one.start()
    try:
        yield watch
    finally:
        watch.is_over.set()
        for one in threads:
            one.join()


def ask(pasture: Pasture, sent: Sent) -> tuple[HTTPResponse, str]:
    """The answer to its end."""
    with socket.create_connection(("127.0.0.1", pasture.door.port), 120.0) as client:
        with contextlib.suppress(ConnectionError):  # refused before its end
            client.sendall(sent.head(pasture.evil) + sent.body)
        answer = HTTPResponse(client, method=sent.method)
        answer.begin()
        return answer, answer.read().decode(errors="replace")


def check(sent: Sent, answer: HTTPResponse, text: str) -> None:
    """An answer, or a refusal in the form of the endpoint."""
    status, kind = answer.status, answer.headers.get_content_type()
    if status == 307 or sent.method == "HEAD" or sent.path.startswith("/board"):
        assert status < 500
    elif status < 300:
        if kind == "text/event-stream":
            check_stream(sent.path, text)
    else:
        names = {name.lower() for name, _ in sent.headers}
        # The answer under a key is that of its first request, which may have set itself a time.
        has_time = b'"timeout"' in sent.body or names & {"x-request-timeout-ms", "idempotency-key"}
        assert 400 <= status < 500 or (status in LATE and has_time), "no 4xx"
        assert kind == "application/json"
        told = json.loads(text)
        assert isinstance(told["error"]["message"], str)
        assert told["error"]["message"]
        assert isinstance(told["error"]["type"], str)
        is_of_messages = sent.path.startswith("/v1/messages")
        assert (told.get("type") == "error") is is_of_messages
        assert {"param", "code"} <= told["error"].keys() or is_of_messages


@dataclass
class Trial:
    """Bad input in turn, from several clients, and what it did."""

    pasture: Pasture
    bad: BadInput
    faults: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    under_way: set[int] = field(default_factory=set)
    slow: set[int] = field(default_factory=set)
    stall_s: tuple[float, float] = (0.0, 0.0)

    def send(self, number: int) -> None:
        """One request, its answer, and how long it held up the gateway."""
        if len(self.faults) > MOST_FAULTS:
            return
        sent = self.bad.draw(number)
        name = name_of(number, sent)
        self.under_way.add(number)
        try:
            answer, text = ask(self.pasture, sent)
            self.statuses[answer.status] += 1
            try:
                check(sent, answer, text)
            except (AssertionError, ValueError, LookupError, TypeError) as error:
                self.faults.append(f"{name}: {answer.status} {text[:300]!r}: {error!r:.300}")
        except OSError as error:
            self.faults.append(f"{name}: {error!r}")
        stall = self.pasture.program.stalls.take()
        self.stall_s = max(self.stall_s[0], stall.own_s), max(self.stall_s[1], stall.wall_s)
        if stall.own_s > LONGEST_S:
            self.slow |= self.under_way
        self.under_way.remove(number)

    def send_slow_again(self) -> None:
        """Ask alone what was under way in a stall: beside others any takes longer now and then."""
        for number in sorted(self.slow):
            sent = self.bad.draw(number)
            least_s = min(self._stall_s(sent) for _ in range(3))
            if least_s > LONGEST_S:
                self.faults.append(f"{1000 * least_s:.0f} ms: {name_of(number, sent)}")

    def _stall_s(self, sent: Sent) -> float:
        self.pasture.program.stalls.take()
        ask(self.pasture, sent)
        return self.pasture.program.stalls.take().own_s


def name_of(number: int, sent: Sent) -> str:
    return f"{number}: {sent.what} {sent.method} {sent.path[:200]}, {len(sent.body)} bytes"


def memory(program: Program) -> int:
    """The most bytes since `forget_memory`."""
    text = Path(f"/proc/{program.pid}/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s*(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(kib)


def forget_memory(program: Program) -> int:
    """The bytes now."""
    Path(f"/proc/{program.pid}/clear_refs").write_text("5")
    return psutil.Process(program.pid).memory_info().rss


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_bad_input_is_refused_and_nobody_else_notices(pasture: Pasture, count: int) -> None:
    document = httpx.get(
        f"{pasture.door.url}/openapi.json",
        headers={"Authorization": f"Bearer {pasture.evil}"},
        timeout=60.0,
    ).json()
    trial = Trial(pasture, BadInput(document, GatewaySettings(redis_url="").max_body_bytes))
    before = forget_memory(pasture.program)
    pasture.program.stalls.take()

    with watched(pasture) as watch, ThreadPoolExecutor(AT_ONCE) as clients:
        list(clients.map(trial.send, range(count)))
    trial.send_slow_again()

    grown = memory(pasture.program) - before
    live_s = sorted(watch.live_s)
    figures = {
        "statuses": dict(sorted(trial.statuses.items())),
        "stall, ms: own, by the wall": [round(1000 * one, 1) for one in trial.stall_s],
        "asked again": len(trial.slow),
        "memory, MiB": round(grown / 2**20),
        "streams": watch.streams,
        "livez, ms: median, 99 %, longest": [
            round(1000 * live_s[at], 1) for at in (len(live_s) // 2, len(live_s) * 99 // 100, -1)
        ],
    }
    print(json.dumps(figures, indent=1))  # noqa: T201 - worth reading where it passes, too
    assert not trial.faults + watch.faults, "\n".join(trial.faults + watch.faults)
    assert grown < MOST_BYTES, figures
    assert watch.streams
    for program in pasture.plant.programs:
        assert program.is_running
        assert "Traceback" not in program.log, program.log[-4000:]
