"""Requests to the simulated engine with known tokens, and checks of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.support.builders import make_assignment, make_request
from tests.support.processes import ANSWER_S, Answer, Plant
from tests.support.waiting import eventually
from tokenyard import Handle
from tokenyard.protocol.wire import Request, SamplingParams
from worker.engines import Finished
from worker.engines.simulated.engine import SimulatedEngine


def streams(count: int, max_tokens: int = 150, **fields: object) -> list[Request]:
    """Streams with different prompts, long enough to be met halfway on a busy machine."""
    params = SamplingParams(max_tokens=max_tokens)
    return [
        make_request(tokens=[n + 1, n + 2], stream=True, params=params, **fields)
        for n in range(count)
    ]


def expected(request: Request, weights: str = "") -> list[int]:
    """The tokens of a request on an undisturbed engine with these weights."""
    engine = SimulatedEngine("sim", weights=weights)
    engine.add(make_assignment(request))
    while True:
        for event in engine.step():
            if isinstance(event, Finished):
                return list(event.choices[0].tokens)


def check_exact(
    plant: Plant,
    requests: Sequence[Request],
    wanted: Callable[[Request], list[int]] = expected,
) -> list[Answer]:
    """Check that each stream has one result, with the tokens of an undisturbed run; the answers."""
    plant.results(requests)
    answers = [plant.answer(request.id) for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        assert answer.result.ok, answer.result.error
        assert answer.result.tokens == wanted(request)
        answer.check_stream()
    return answers


def check_handles(handles: Sequence[Handle], prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Check that a client's streams have the tokens of an undisturbed run, each once."""
    params = SamplingParams(max_tokens=max_tokens)
    for prompt, handle in zip(prompts, handles, strict=True):
        tokens = handle.result(ANSWER_S).tokens
        assert tokens == expected(make_request(tokens=prompt, params=params))
        assert [token for delta in handle for token in delta.tokens] == tokens


def check_beginning(plant: Plant, request: Request) -> Answer:
    """Check an incomplete request: one result, whose tokens are a prefix of the expected ones."""
    answer = plant.answer(request.id)
    answer.check_stream()
    made = answer.result.tokens
    assert made == expected(request)[: len(made)]
    return answer


def attempts(answers: Sequence[Answer]) -> list[int]:
    """The attempt of each answer."""
    return [
        answer.result.provenance.attempt if answer.result.provenance else 0 for answer in answers
    ]


def wait_mid_stream(plant: Plant, requests: Sequence[Request], least: int = 3) -> None:
    """Wait until all of the streams have published some tokens."""
    eventually(lambda: all(plant.published(request.id) >= least for request in requests))


def begun(plant: Plant, count: int, max_tokens: int = 150, **fields: object) -> list[Request]:
    """Submit streams; they, once all of them have published some tokens."""
    requests = streams(count, max_tokens, **fields)
    plant.push_all(requests)
    wait_mid_stream(plant, requests)
    return requests


def check_serves(plant: Plant, count: int = 2) -> list[Answer]:
    """Check that the yard serves new streams; their answers."""
    requests = streams(count, max_tokens=5)
    plant.push_all(requests)
    return check_exact(plant, requests)


def held_by(plant: Plant, requests: Sequence[Request], worker: str) -> list[Request]:
    """The requests among these that are on a worker's lane."""
    return [one for one in requests if plant.ledger(one.id).get("worker") == worker]


def dead_letters(plant: Plant) -> list[dict[str, str]]:
    """The yard's dead letters, as text."""
    return [
        {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
        for _, fields in plant.connection.xrange(plant.keys.dead)
    ]
