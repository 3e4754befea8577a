"""Several models on real vLLM: warm processes load each requested model."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.builders import random_name
from tests.support.processes import ROOT
from tests.support.up import Up, running_up, tokenyard
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.protocol.worker_info import WorkerInfo

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

EXAMPLE = ROOT / "examples" / "arithmetic"
#: The operation that each name answers; the last is an adapter of the adder.
SIGNS = {"adder": "+", "subtractor": "-", "adder-subtracts": "-"}
WAIT_S = 200.0
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 50}


@pytest.fixture(scope="module")
def models_yard(
    no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Up]:
    """`tokenyard up` with the example's models, and the adder once more for two devices."""
    folder = tmp_path_factory.mktemp("models")
    listed = (EXAMPLE / "models.toml").read_text()
    listed = listed.replace('path = "', f'path = "{EXAMPLE}/')
    listed = listed.replace("[defaults]\n", "[defaults]\nmax_model_wait_s = 1.0\n")
    listed += f"""
[models.adder-on-two]
path = "{EXAMPLE}/models/adder"
tensor_parallel_size = 2
"""
    (folder / "models.toml").write_text(listed)
    options = ("--models", str(folder / "models.toml"), "--slots", "2", "--spares", "1")
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise leftovers of a first model or group are replaced, and no process is the same.
        patch.setenv("TOKENYARD_WORKER_LEAK_TOLERANCE", "1")
        with running_up(folder, *options) as up:
            yield up


@pytest.fixture
def client(models_yard: Up) -> Iterator[Client]:
    with Client(models_yard.url, yard=models_yard.yard, client_id=random_name("client")) as one:
        yield one


def info(up: Up) -> dict[str, Any]:
    """The output of `tokenyard info --json`."""
    told = tokenyard("--redis-url", up.url, "--yard", up.yard, "info", "--json")
    assert told.returncode == 0, told.stderr
    view: dict[str, Any] = json.loads(told.stdout)
    return view


def questions(count: int, names: list[str], seed: int) -> list[tuple[str, str, str]]:
    """Model, prompt and answer of each question; the models take turns."""
    draw = random.Random(seed)
    asked = []
    for at in range(count):
        name = names[at % len(names)]
        left, right = draw.randrange(10, 100), draw.randrange(10, 100)
        answer = left + right if SIGNS[name] == "+" else left - right
        asked.append((name, f"{left}{SIGNS[name]}{right}=", str(answer)))
    return asked


def holders(client: Client, model: str, state: str = "ready") -> list[WorkerInfo]:
    return [
        one for one in client.info().workers.values() if (one.model, one.state) == (model, state)
    ]


def pids(client: Client) -> set[int]:
    return {one.pid for one in client.info().workers.values()}


def test_a_cold_yard_serves_any_model(models_yard: Up, client: Client) -> None:
    # Given a yard whose processes are warm and hold no model
    cold = info(models_yard)
    assert [one["state"] for one in cold["workers"]] == ["warm"] * 3
    assert all(sum(one["info"]["phases_s"].values()) > 0 for one in cold["workers"])
    assert cold["models"] == {}

    # If requests for two models and an adapter take turns
    asked = questions(200, list(SIGNS), seed=1)
    handles = [client.submit(prompt, model=name) for name, prompt, _ in asked]
    results = [handle.result(WAIT_S) for handle in handles]

    # I expect every answer to be right and to come from the requested model,
    wrong = [
        (name, prompt, result.text)
        for (name, prompt, answer), result in zip(asked, results, strict=True)
        if result.text != answer
    ]
    assert wrong == []
    told = [one.provenance.model if one.provenance else "" for one in results]
    assert told == [name for name, _, _ in asked]
    # by the same processes; I expect `info` to show their models and load times.
    after = info(models_yard)
    assert {one["info"]["pid"] for one in after["workers"]} == {
        one["info"]["pid"] for one in cold["workers"]
    }
    held = {one["info"].get("model", ""): one["info"] for one in after["workers"]}
    assert held.keys() == {"adder", "subtractor", ""}
    assert held["adder"]["adapters"] == ["adder-subtracts"]
    for model in ("adder", "subtractor"):
        assert held[model]["phases_s"]["weights"] > 0
    loadable = {one["name"]: one for one in after["hosts"][0]["models"]}
    assert loadable.keys() == {"adder", "subtractor", "adder-on-two"}
    assert loadable["adder"]["load_s"] > 0


def test_a_spare_replaces_a_killed_busy_worker(models_yard: Up, client: Client) -> None:
    # Given streams of the model on the device with a spare process
    for name, prompt, answer in questions(2, ["adder", "subtractor"], seed=2):
        assert client.submit(prompt, model=name).result(WAIT_S).text == answer
    found = client.info().workers.values()
    (spare,) = (one for one in found if one.state == "warm")
    (victim,) = (one for one in found if one.device == spare.device and one.state == "ready")
    model = victim.model
    asked = questions(40, [model], seed=3)
    calm = [client.submit(prompt, model=model).result(WAIT_S) for _, prompt, _ in asked]
    items = [prompt for _, prompt, _ in asked]
    for _ in range(10):
        handles = client.submit_many(items, model=model, stream=True, **LONG)
        streams = [iter(handle) for handle in handles]
        firsts = [next(stream) for stream in streams]
        os.kill(victim.core_pid, signal.SIGSTOP)
        if not all(handle.status().is_over for handle in handles):
            break
        os.kill(victim.core_pid, signal.SIGCONT)  # all had ended before this test had looked

    # If the process with its model is killed in mid-stream
    os.kill(victim.core_pid, signal.SIGKILL)

    # I expect every token once, the spare to hold the model,
    attempts = set()
    for handle, first, stream, before in zip(handles, firsts, streams, calm, strict=True):
        deltas = [first, *stream]
        result = handle.result(WAIT_S)
        seen: list[int] = []
        for delta in deltas:
            assert delta.seq == len(seen)
            seen += delta.tokens
        assert seen == result.tokens
        assert len(seen) == 50
        assert seen[: len(before.tokens)] == before.tokens
        assert result.provenance is not None
        attempts.add(result.provenance.attempt)
    assert 2 in attempts, "nothing ran on the worker that was killed"
    assert [one.pid for one in holders(client, model)] == [spare.pid]
    # and another spare to start.
    whole = eventually(
        lambda: len(now := pids(client) - {victim.pid}) == 3 and now,
        timeout_s=WAIT_S,
        every_s=0.2,
    )
    assert whole == set(models_yard.worker_pids())


def test_two_devices_serve_one_model_and_then_separate(models_yard: Up, client: Client) -> None:
    # Given the answers of one rank
    asked = questions(20, ["adder"], seed=4)
    alone = [client.submit(prompt, model="adder").result(WAIT_S) for _, prompt, _ in asked]
    eventually(
        lambda: all(one.state in ("warm", "ready") for one in client.info().workers.values()),
        timeout_s=WAIT_S,
        every_s=0.2,
    )
    before = pids(client)

    # If two ranks are asked
    handles = [client.submit(prompt, model="adder-on-two") for _, prompt, _ in asked]
    together = [handle.result(WAIT_S) for handle in handles]

    # I expect the same tokens, from two existing processes,
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.text for one in together] == [answer for _, _, answer in asked]
    (leader,) = holders(client, "adder-on-two")
    (follower,) = holders(client, "adder-on-two", "attached")
    assert leader.group == follower.group == [leader.name, follower.name]
    assert {leader.device, follower.device} == {0, 1}
    assert pids(client) == before
    # which return to the pool when another model needs one of them.
    ((_, prompt, answer),) = questions(1, ["subtractor"], seed=5)
    assert client.submit(prompt, model="subtractor").result(WAIT_S).text == answer
    assert holders(client, "adder-on-two") == []
    (holder,) = holders(client, "subtractor")
    assert holder.group == []
    assert holder.pid in before
    eventually(
        lambda: (
            sorted(one.state for one in client.info().workers.values()) == ["ready", "warm", "warm"]
        ),
        timeout_s=WAIT_S,
        every_s=0.2,
    )
    assert pids(client) == before
    assert set(models_yard.worker_pids()) == before
