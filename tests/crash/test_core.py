"""Deaths of the two processes of a vLLM worker: the front that talks to the yard, and the core."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

from tests.engines.harness import MODELS
from tests.support.builders import make_request
from tests.support.processes import Plant, is_gone
from tests.support.waiting import eventually
from tokenyard.protocol.replies import Result
from tokenyard.protocol.wire import Request, SamplingParams

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.crash, pytest.mark.timeout(400)]

ADDER: dict[str, object] = {
    "engine": "vllm",
    "model": MODELS / "adder",
    "model_name": "adder",
    "dtype": "float32",
    "enforce_eager": True,
}
LONG = SamplingParams(max_tokens=56, temperature=0.0, ignore_eos=True)


def up(plant: Plant, **options: object) -> None:
    """A yard with one worker, which holds the adder."""
    plant.coordinator()
    plant.worker(**ADDER, **options)
    eventually(lambda: {one.state for one in plant.roster().values()} == {"ready"}, timeout_s=200)


def pids(plant: Plant) -> tuple[int, int]:
    """Of the front and the core."""
    (info,) = plant.roster().values()
    return info.pid, info.core_pid


def ask(plant: Plant, count: int, **fields: object) -> list[Request]:
    questions = [f"{20 + number}+{50 + number}=" for number in range(count)]
    made = [make_request(prompt=text, params=LONG, **fields) for text in questions]
    plant.push_all(made)
    return made


def tokens(plant: Plant, requests: list[Request]) -> list[list[int]]:
    results: list[Result] = [plant.result(one.id) for one in requests]
    assert {one.status for one in results} == {"completed"}
    return [one.tokens for one in results]


@pytest.fixture
def right(plant: Plant) -> list[list[int]]:
    """The answers of a worker that nothing happens to."""
    up(plant)
    return tokens(plant, ask(plant, 40))


def test_a_killed_front_is_replaced_without_a_reload(plant: Plant, right: list[list[int]]) -> None:
    front, core = pids(plant)
    requests = ask(plant, 40)

    os.kill(front, signal.SIGKILL)

    assert tokens(plant, requests) == right
    eventually(lambda: plant.roster() and pids(plant)[0] != front)
    assert pids(plant)[1] == core


def test_a_front_is_replaced_again_and_again(plant: Plant, right: list[list[int]]) -> None:
    _, core = pids(plant)
    for _ in range(5):
        requests = ask(plant, 10, stream=True)
        eventually(lambda these=requests: any(plant.published(one.id) for one in these))
        front, same = pids(plant)
        os.kill(front, signal.SIGKILL)
        assert same == core
        assert tokens(plant, requests) == right[:10]
        eventually(lambda killed=front: plant.roster() and pids(plant)[0] != killed)


def test_what_a_core_says_after_its_front_was_replaced_is_heard(
    plant: Plant,
) -> None:
    up(plant, debug=True)  # which shows the stacks of crashes
    front, core = pids(plant)
    os.kill(front, signal.SIGSEGV)
    eventually(lambda: plant.roster() and pids(plant)[0] != front)

    os.kill(core, signal.SIGABRT)

    assert len(tokens(plant, ask(plant, 5))) == 5
    assert "Fatal Python error: Aborted" in plant.programs[-1].log


def test_a_killed_core_ends_its_front_at_once(plant: Plant, right: list[list[int]]) -> None:
    front, core = pids(plant)
    requests = ask(plant, 40, stream=True)
    eventually(lambda: any(plant.published(one.id) for one in requests))

    os.kill(core, signal.SIGKILL)

    eventually(lambda: is_gone(front))
    assert tokens(plant, requests) == right
    assert {plant.ledger(one.id).get("suspected", "0") for one in requests} == {"0"}


def test_a_core_that_crashes_makes_its_requests_suspects(
    plant: Plant, right: list[list[int]]
) -> None:
    front, core = pids(plant)
    os.kill(core, signal.SIGSTOP)  # or it might have answered all before it crashes
    requests = ask(plant, 10, stream=True)
    eventually(lambda: all(plant.ledger(one.id).get("worker") for one in requests))

    # To the thread that runs steps: any other may take a signal to the process, and steps go on
    ctypes.CDLL(None).tgkill(core, core, signal.SIGSEGV)
    os.kill(core, signal.SIGCONT)

    eventually(lambda: is_gone(front))
    assert tokens(plant, requests) == right[:10]
    assert "1" in {plant.ledger(one.id).get("suspected") for one in requests}


def test_an_idle_core_that_is_killed_is_replaced(plant: Plant, right: list[list[int]]) -> None:
    front, core = pids(plant)
    os.kill(core, signal.SIGKILL)
    eventually(lambda: is_gone(front))
    assert tokens(plant, ask(plant, 5)) == right[:5]


def test_a_core_that_hangs_is_killed(plant: Plant) -> None:
    up(plant, hang_timeout_s=2.0)
    _, core = pids(plant)
    os.kill(core, signal.SIGSTOP)
    assert len(tokens(plant, ask(plant, 5))) == 5
    assert is_gone(core)


def test_a_front_that_is_killed_while_its_core_loads_is_replaced(plant: Plant) -> None:
    plant.coordinator()
    plant.worker(**ADDER)

    def loading() -> int:
        return next((one.pid for one in plant.roster().values() if one.state == "loading"), 0)

    eventually(loading, timeout_s=200.0, every_s=0.001)
    os.kill(loading() or pids(plant)[0], signal.SIGKILL)
    assert len(tokens(plant, ask(plant, 5))) == 5
