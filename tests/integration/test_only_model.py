"""Requests that name no model: they mean the only one that is there."""

from __future__ import annotations

import pytest

from coordinator.coordinator import Coordinator
from tests.integration.operating import Opened
from tests.support.builders import make_delta, make_request
from tests.support.lanes import Lanes
from tests.support.waiting import eventually
from tokenyard.protocol.replies import to_result
from tokenyard.scripts.answers import Publication


class Yard(Lanes):
    """A yard with static workers that may leave."""

    def leave(self, worker: str, leading: Coordinator) -> None:
        """Let a worker leave; the leader has noticed on return."""
        self.scripts.retire(worker, "left")

        def is_gone() -> bool:
            leading.run_once()
            return worker not in leading._roster.members

        eventually(is_gone)

    def default_model(self) -> str:
        return (self.connection.hget(self.keys.info, "default_model") or b"").decode()


@pytest.fixture
def yard(opened: Opened) -> Yard:
    return opened(Yard)


def turned_to(yard: Yard, leading: Coordinator, model: str) -> None:
    """Turn until that is the only model."""

    def is_default() -> bool:
        leading.run_once()
        return yard.default_model() == model

    eventually(is_default)


def test_a_model_that_is_gone_does_not_compete(yard: Yard) -> None:
    # Given a yard that once had another model
    old = yard.worker("old", model="old")
    leading = yard.take_lead()
    yard.leave(old, leading)
    new = yard.worker("new", model="new")
    turned_to(yard, leading, "new")

    (nameless,) = yard.push([make_request("nameless")])

    eventually(lambda: leading.run_once() or yard.ids(new) == [nameless])


def test_a_request_waits_while_nobody_is_there_also_for_a_successor(yard: Yard) -> None:
    # Given a yard that has had two models, the second of which was the only one
    leading = yard.take_lead()
    yard.leave(yard.worker("old", model="old"), leading)
    worker = yard.worker("new", model="new")
    turned_to(yard, leading, "new")
    yard.leave(worker, leading)

    (nameless,) = yard.push([make_request("nameless")])
    leading.run_once()
    leading._close()
    successor = yard.take_lead(name="successor")
    successor.run_once()

    assert [(one.model, one.requests) for one in successor._dispatcher.demands()] == [("new", 1)]
    worker = yard.worker("new", model="new")
    eventually(lambda: successor.run_once() or yard.ids(worker) == [nameless])


def test_of_several_none_is_meant(yard: Yard) -> None:
    # Given two models, and one that is gone
    leading = yard.take_lead()
    yard.leave(yard.worker("old", model="old"), leading)
    yard.worker("a", model="a")
    turned_to(yard, leading, "a")
    yard.worker("b", model="b")
    turned_to(yard, leading, "")

    (nameless,) = yard.push([make_request("nameless")])
    leading.run_once()

    error = to_result(yard.result(nameless)).error
    assert error.message == "model: none given; served: a, b"


@pytest.mark.parametrize("tokens", [(), (0, 7)])
def test_an_answer_goes_on_with_the_model_that_began_it(yard: Yard, tokens: tuple[int]) -> None:
    # Given a request that names no model and runs, perhaps with published tokens
    first = yard.worker("first", model="old")
    leading = yard.take_lead()
    (nameless,) = yard.push([make_request("nameless", stream=True)])
    eventually(lambda: leading.run_once() or yard.ids(first) == [nameless])
    (assignment,) = yard.lane(first)
    if tokens:
        yard.scripts.emit(first, [Publication(assignment, make_delta(nameless, 0, [*tokens]))])

    # If its worker dies, and then only another model is there, I expect it to wait, and to go to
    # that model's next worker.
    yard.leave(first, leading)
    other = yard.worker("other", model="new")
    turned_to(yard, leading, "new")
    assert [(one.model, one.requests) for one in leading._dispatcher.demands()] == [("old", 1)]
    second = yard.worker("second", model="old")
    eventually(lambda: leading.run_once() or yard.ids(second) == [nameless])
    assert yard.ids(other) == []
