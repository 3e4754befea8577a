"""Streams of several choices whose workers die: each choice continues after its own tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from tests.support.builders import make_assignment, make_request
from tests.support.processes import Answer, Plant
from tests.support.servers import Server
from tests.support.streams import dead_letters, wait_mid_stream
from tokenyard.protocol.replies import Choice
from tokenyard.protocol.wire import Request, SamplingParams
from worker.engines import Finished
from worker.engines.simulated.engine import SimulatedEngine

pytestmark = pytest.mark.crash


@pytest.fixture
def plant(broker: Server) -> Iterator[Plant]:
    with Plant(broker.url) as started:
        yield started


def requests() -> list[Request]:
    """Streams of two to four choices that end at different positions."""
    return [
        make_request(
            tokens=[n + 1, n + 2],
            stream=True,
            params=SamplingParams(n=2 + n % 3, max_tokens=120, stop=stop, detokenize=True, seed=n),
        )
        for n, stop in enumerate([None, ["A"], ["z", "B"], None, ["!"], ["Q7", "x"]])
    ]


def undisturbed(request: Request) -> Sequence[Choice]:
    engine = SimulatedEngine("sim")
    engine.add(make_assignment(request))
    while True:
        for event in engine.step():
            if isinstance(event, Finished):
                return event.choices


def check(answer: Answer, request: Request) -> None:
    """Check that each choice has every token once, as without a crash."""
    shown: dict[int, list[int]] = {}
    for delta in answer.deltas:
        assert delta.seq == sum(map(len, shown.values()))
        shown.setdefault(delta.index, []).extend(delta.tokens)
    assert answer.result.ok, answer.result.error
    choices = answer.result.choices or []
    assert [(one.tokens, one.text, one.finish_reason) for one in choices] == [
        (one.tokens, one.text, one.finish_reason) for one in undisturbed(request)
    ]
    for choice in choices:
        seen = shown.get(choice.index, [])
        assert seen == choice.tokens[: len(seen)]


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSEGV])
def test_each_choice_continues_after_its_own_tokens(plant: Plant, end: signal.Signals) -> None:
    # Given streams of several choices on a worker
    plant.coordinator()
    plant.worker(simulated_step_s=0.03)
    asked = requests()
    plant.wait_for_workers(1)
    plant.push_all(asked)

    # If it dies twice in mid-stream
    for least in (6, 40):
        long = [asked[0], asked[3]]
        wait_mid_stream(plant, long, least=least)
        (worker,) = plant.wait_for_workers(1).values()
        os.kill(worker.pid, end)
        plant.wait_for_workers(1)

    # I expect each choice to be as without a crash.
    plant.results(asked)
    for request in asked:
        check(plant.answer(request.id), request)
    assert any(int(plant.ledger(one.id)["attempt"]) >= 2 for one in asked)
    assert dead_letters(plant) == []
    assert not plant.connection.exists(*(plant.keys.choices("anon", one.id) for one in asked))
