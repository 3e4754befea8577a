"""Many streams through a bridge while everything dies, again and again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.crash.test_bridge import bridge, made
from tests.crash.test_core import ADDER
from tests.engines.harness import MODELS
from tests.support.builders import make_request
from tests.support.front_end import ERROR, FrontEnd
from tests.support.processes import Plant, Program
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.protocol.wire import SamplingParams

pytestmark = [pytest.mark.crash, pytest.mark.long, pytest.mark.timeout(900)]

STREAMS = 1000
IN_FLIGHT = 50
TOKENS = 40


@pytest.fixture
def plant(broker: Server) -> Iterator[Plant]:
    with Plant(broker.url) as started:
        yield started


def test_a_thousand_streams_are_right_whatever_dies(plant: Plant, tmp_path: Path) -> None:
    """Each is asked by a name until it has come to its end: always the same, generated once."""
    plant.coordinator()
    plant.coordinator()
    controller = plant.worker(slots=3, simulated_step_s=0.01)
    plant.wait_for_workers(3)
    prompts = [[number] for number in range(STREAMS)]
    ask_until_all_are_right(
        plant, controller, tmp_path, prompts, [made(one, TOKENS) for one in prompts]
    )


@pytest.mark.vllm
def test_a_thousand_streams_of_vllm_are_right_whatever_dies(plant: Plant, tmp_path: Path) -> None:
    """As above; fronts and cores of the workers die alike."""
    plant.coordinator()
    plant.coordinator()
    controller = plant.worker(**ADDER, slots=2)
    eventually(
        lambda: [one.state for one in plant.roster().values()] == ["ready"] * 2, timeout_s=200
    )
    read = Tokenizer.from_file(str(MODELS / "adder" / "tokenizer.json"))
    sums = [f"{10 + number // 90}+{10 + number % 90}=" for number in range(STREAMS)]
    prompts = [read.encode(one).ids for one in sums]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    undisturbed = [make_request(tokens=one, params=params) for one in prompts]
    plant.push_all(undisturbed)
    right = [one.tokens for one in plant.results(undisturbed)]
    assert {len(one) for one in right} == {TOKENS}
    ask_until_all_are_right(plant, controller, tmp_path, prompts, right)


def ask_until_all_are_right(
    plant: Plant,
    controller: Program,
    folder: Path,
    prompts: Sequence[list[int]],
    right: Sequence[list[int]],
) -> None:
    """Ask for all answers under a name, and again until each has come to its end."""
    draw = random.Random(7)
    seen: dict[int, list[int]] = {}
    waiting = list(range(STREAMS))
    tries = itertools.count()
    deaths = {"worker": 0, "bridge": 0, "front end": 0, "both": 0}
    port = 0
    program: Program | None = None
    while waiting:
        with FrontEnd(port) as front:
            port = front.port
            if program is None or not program.is_running:
                program = bridge(plant, front, folder)
            front.meet()
            while waiting:
                burst = {
                    f"cmpl-idem-{number}-0-{next(tries)}": number for number in waiting[:IN_FLIGHT]
                }
                for name, number in burst.items():
                    front.ask(
                        name,
                        prompts[number],
                        name=f"cmpl-idem-{number}-0",
                        max_tokens=TOKENS,
                        _eos_token_id=None,  # an answer does not end before
                    )
                front.wait_for_tokens(draw.choice(list(burst)), draw.randrange(1, TOKENS))
                victim = draw.choice(["worker", "bridge", "front end", "both", "nobody"])
                deaths[victim] = deaths.get(victim, 0) + 1
                if victim == "worker":
                    draw.choice(controller.children()).kill()
                if victim in {"bridge", "both"}:
                    program.kill()
                if victim in {"front end", "both"}:
                    break
                if victim == "bridge":
                    program = bridge(plant, front, folder)
                    front.wait_for_engine()
                for name in burst:
                    front.wait(name)
                _check(front, burst, right, seen)
                waiting = [number for number in waiting if len(seen.get(number, ())) < TOKENS]
            front.read()
            _check(front, burst, right, seen)
    assert min(deaths.values()) > 0, deaths
    attempts = [plant.ledger(f"cmpl-idem-{number}-0", "http") for number in range(STREAMS)]
    assert {one["state"] for one in attempts} == {"completed"}


def _check(
    front: FrontEnd,
    burst: Mapping[str, int],
    right: Sequence[list[int]],
    seen: dict[int, list[int]],
) -> None:
    """What came is a beginning of the right answer, all of it unless it ended with an error."""
    for name, number in burst.items():
        answer, whole = front.answers[name], right[number]
        assert answer.tokens == whole[: len(answer.tokens)]
        if answer.finish not in {None, ERROR}:
            assert answer.tokens == whole
        if len(answer.tokens) >= len(seen.get(number, ())):
            seen[number] = answer.tokens


def test_the_loop_above_would_notice_a_wrong_token() -> None:
    """The check of it can fail."""
    with FrontEnd() as front:
        front.answers["x"].pieces = [made([5], TOKENS)[:3], [0]]
        with pytest.raises(AssertionError):
            _check(front, {"x": 0}, [made([5], TOKENS)], {})
