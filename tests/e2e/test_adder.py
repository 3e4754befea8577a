"""The main task on real vLLM: a request goes in, the right answer comes out."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.gateway.stand import Stand
from tests.support.builders import random_name
from tests.support.up import tokenyard
from tokenyard import Client
from worker.process.publisher import STEPS_AT_ONCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
GREEDY = {"model": "adder", "max_tokens": 8, "temperature": 0.0}


@pytest.fixture
def client(stand: Stand) -> Iterator[Client]:
    """A new client for each test."""
    with Client(
        stand.plant.url, yard=stand.plant.keys.yard, client_id=random_name("client")
    ) as one:
        yield one


def sums(count: int, seed: int) -> list[tuple[str, str]]:
    """Sums with their answers, different for each seed."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(count)]
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def test_a_question_is_answered_with_its_provenance(client: Client) -> None:
    result = client.submit("12+34=", **GREEDY).result(60)

    assert result.text == "46"
    assert result.finish_reason == "stop"
    assert result.usage is not None
    assert result.usage.prompt_tokens == 6
    assert result.provenance is not None
    assert result.provenance.model == "adder"
    assert result.provenance.engine == "vllm"
    assert result.provenance.attempt == 1


def test_redis_cli_alone_is_a_client(stand: Stand) -> None:
    """Run the README's example with a program that knows nothing of Tokenyard."""
    port = stand.plant.url.rpartition(":")[2].partition("/")[0]
    yard_keys = stand.plant.keys
    speak = [sys.executable, "-c", _BARE_CLIENT, port, yard_keys.intake("normal")]
    speak.append(yard_keys.reply("anon", "q1"))

    answer = subprocess.run(speak, capture_output=True, timeout=70, check=True).stdout

    assert b"\r\n46\r\n" in answer
    assert b"completed" in answer


#: XADD and XREAD over a bare socket, as redis-cli sends them, which may not be installed.
_BARE_CLIENT = """
import socket, sys
port, intake, reply = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def command(*words):
    return b"".join([b"*%d\\r\\n" % len(words)]
        + [b"$%d\\r\\n%s\\r\\n" % (len(w.encode()), w.encode()) for w in words])
s = socket.create_connection(("127.0.0.1", port), timeout=60)
s.sendall(command("XADD", intake, "*", "id", "q1", "model", "adder", "prompt", "12+34=",
                  "params", '{"max_tokens":8,"temperature":0}'))
s.recv(4096)
s.sendall(command("XREAD", "BLOCK", "60000", "STREAMS", reply, "0"))
sys.stdout.buffer.write(s.recv(65536))
"""


@pytest.mark.parametrize("interval_ms", [None, 0, 30, 100])
def test_a_stream_adds_up_to_its_result(client: Client, interval_ms: int | None) -> None:
    # More tokens than a worker publishes at once, however busy the machine is
    handle = client.submit(
        "67+89=",
        stream=True,
        stream_interval_ms=interval_ms,
        ignore_eos=True,
        **GREEDY | {"max_tokens": 3 * STEPS_AT_ONCE},
    )

    deltas = list(handle)

    result = handle.result(60)
    assert len(result.tokens) == 3 * STEPS_AT_ONCE
    assert [token for delta in deltas for token in delta.tokens] == result.tokens
    assert "".join(delta.text or "" for delta in deltas) == result.text
    assert result.text.startswith("156")
    assert len(deltas) > 1


def test_chat_messages_go_through_the_models_template(client: Client) -> None:
    result = client.submit([{"role": "user", "content": "20+22="}], **GREEDY).result(60)

    assert result.text == "42"


def test_vllms_parameters_have_the_same_effect_as_in_vllm(client: Client) -> None:
    several = client.submit("11+11=", n=2, seed=1, **GREEDY | {"temperature": 0.01}).result(60)
    chosen = client.submit("11+11=", structured_outputs={"choice": ["99", "98"]}, **GREEDY).result(
        60
    )
    cut = client.submit("67+89=", **GREEDY | {"max_tokens": 2}).result(60)
    stopped = client.submit("67+89=", stop="5", **GREEDY).result(60)
    likely = client.submit("67+89=", logprobs=1, **GREEDY).result(60)

    assert several.choices is not None
    assert [choice.text for choice in several.choices] == ["22", "22"]
    assert chosen.text in {"98", "99"}
    assert (cut.text, cut.finish_reason) == ("15", "length")
    assert (stopped.text, stopped.stop_reason) == ("1", "5")
    assert likely.logprobs is not None
    assert len(likely.logprobs) == len(likely.tokens)


def test_four_concurrent_clients_get_their_own_right_answers(stand: Stand) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ASK_500, stand.plant.url, stand.plant.keys.yard, str(seed)],
            stdout=subprocess.PIPE,
        )
        for seed in range(4)
    ]

    reports = [json.loads(process.communicate(timeout=300)[0]) for process in processes]

    assert reports == [{"answered": 500, "right": 500}] * 4


_ASK_500 = """
import json, sys
from tests.e2e.test_adder import GREEDY, sums
from tokenyard import Client
url, yard, seed = sys.argv[1:]
asked = sums(500, int(seed))
with Client(url, yard=yard, client_id="crowd-" + seed) as client:
    results = dict(client.map([question for question, _ in asked], **GREEDY))
right = sum(results[at].text == answer for at, (_, answer) in enumerate(asked))
print(json.dumps({"answered": len(results), "right": right}))
"""


def test_the_command_line_prints_the_answer(stand: Stand) -> None:
    yard = ["--redis-url", stand.plant.url, "--yard", stand.plant.keys.yard]
    asked = tokenyard(
        *yard, "submit", "12+34=", "--model", "adder", "--temperature", "0", "--max-tokens", "8"
    )

    assert asked.returncode == 0, asked.stderr
    assert "46" in asked.stdout
