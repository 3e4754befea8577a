"""Many streams through a bridge while everything dies, again and again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.test_bridge import bridge, made
from tests.support.front_end import ERROR, FrontEnd
from tests.support.processes import Plant, Program
from tests.support.servers import Server

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
    draw = random.Random(7)
    plant.coordinator()
    plant.coordinator()
    controller = plant.worker(slots=3, simulated_step_s=0.01)
    plant.wait_for_workers(3)
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
                program = bridge(plant, front, tmp_path)
            front.meet()
            while waiting:
                burst = {
                    f"cmpl-idem-{number}-0-{next(tries)}": number for number in waiting[:IN_FLIGHT]
                }
                for name, number in burst.items():
                    front.ask(name, [number], name=f"cmpl-idem-{number}-0", max_tokens=TOKENS)
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
                    program = bridge(plant, front, tmp_path)
                    front.wait_for_engine()
                for name in burst:
                    front.wait(name)
                _check(front, burst, seen)
                waiting = [number for number in waiting if len(seen.get(number, ())) < TOKENS]
            front.read()
            _check(front, burst, seen)
    assert min(deaths.values()) > 0, deaths
    attempts = [plant.ledger(f"cmpl-idem-{number}-0", "http") for number in range(STREAMS)]
    assert {one["state"] for one in attempts} == {"completed"}


def _check(front: FrontEnd, burst: dict[str, int], seen: dict[int, list[int]]) -> None:
    """What came is a beginning of the right answer, all of it unless it ended with an error."""
    for name, number in burst.items():
        answer, right = front.answers[name], made([number], TOKENS)
        assert answer.tokens == right[: len(answer.tokens)]
        if answer.finish not in {None, ERROR}:
            assert answer.tokens == right
        if len(answer.tokens) >= len(seen.get(number, ())):
            seen[number] = answer.tokens


def test_the_loop_above_would_notice_a_wrong_token() -> None:
    """The check of it can fail."""
    with FrontEnd() as front:
        front.answers["x"].pieces = [made([5], TOKENS)[:3], [0]]
        with pytest.raises(AssertionError):
            _check(front, {"x": 5}, {})
