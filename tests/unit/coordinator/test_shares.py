"""Turns of clients, and the shares of the classes."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.dispatch.backlog import ModelQueue
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.keys import CLASS_WEIGHTS, PRIORITY_CLASSES, PriorityClass

ALL = sum(CLASS_WEIGHTS.values())


def queued(name: str, intake: PriorityClass = "normal", client: str = "ann") -> QueuedRequest:
    return QueuedRequest(intake=intake, entry=name, id=name, turn=client)


def some(count: int, intake: PriorityClass = "normal", client: str = "ann") -> list[QueuedRequest]:
    return [queued(f"{client}-{intake}-{number}", intake, client) for number in range(count)]


def holding(*requests: QueuedRequest) -> ModelQueue:
    queue = ModelQueue()
    for one in requests:
        queue.add(one)
    return queue


def serve(queue: ModelQueue, count: int, batch: int = 1) -> list[QueuedRequest]:
    """As the dispatcher does: so many, in batches."""
    served: list[QueuedRequest] = []
    while len(served) < count and len(queue):
        chosen = list(islice(queue.others, min(batch, count - len(served))))
        for one in chosen:
            queue.discard(one, is_served=True)
        served += chosen
    return served


def classes(served: list[QueuedRequest]) -> Counter[str]:
    return Counter(one.intake for one in served)


class TestClasses:
    @pytest.mark.parametrize("batch", [1, 7, 1000])
    def test_each_class_has_its_share_while_all_wait(self, batch: int) -> None:
        queue = holding(*(one for name in PRIORITY_CLASSES for one in some(50 * ALL, name)))

        served = serve(queue, 40 * ALL, batch)

        assert classes(served) == {name: 40 * weight for name, weight in CLASS_WEIGHTS.items()}
        assert classes(served[:ALL]) == CLASS_WEIGHTS, "in each round, not only in the end"

    @pytest.mark.long
    def test_shares_hold_during_minutes_of_a_flood(self) -> None:
        """Given 200 requests/s for ten minutes, where each class alone exceeds the capacity."""
        queue, served = ModelQueue(), Counter[str]()
        for second in range(600):
            for name in PRIORITY_CLASSES:
                for number in range(200):
                    queue.add(queued(f"{name}-{second}-{number}", name))
            served += classes(serve(queue, 200, batch=8))

        total = served.total()
        assert total == 120_000
        for name, weight in CLASS_WEIGHTS.items():
            assert served[name] / total == pytest.approx(weight / ALL, rel=0.001)

    @pytest.mark.parametrize("flood", PRIORITY_CLASSES)
    def test_no_class_waits_for_longer_than_a_round(self, flood: PriorityClass) -> None:
        for name in PRIORITY_CLASSES:
            queue = holding(*some(10 * ALL, flood))
            serve(queue, 3 * ALL)
            queue.add(late := queued("late", name, "bob"))
            assert late in serve(queue, ALL + 1), f"{name} behind {flood}"

    def test_unused_shares_are_not_saved_up(self) -> None:
        """Given late low requests, I expect no more than one in a round."""
        queue = holding(*some(2000, "high"), *some(2000, "normal"))
        serve(queue, 1000)
        for one in some(100, "low"):
            queue.add(one)

        served = serve(queue, 2 * ALL)

        assert classes(served)["low"] == 2

    def test_a_class_by_itself_gets_everything(self) -> None:
        requests = some(30, "low")
        assert serve(holding(*requests), 30) == requests

    def test_retries_come_first(self) -> None:
        again = QueuedRequest(intake="retry", entry="r", id="r")
        queue = holding(*some(3, "high"), again)
        assert serve(queue, 2) == [again, *some(1, "high")]


class TestClients:
    def test_clients_take_turns_and_keep_their_own_order(self) -> None:
        flood, few = some(6000, client="ann"), some(3, client="bob")
        queue = holding(*flood, *few)

        served = serve(queue, 7, batch=2)

        assert served == [flood[0], few[0], flood[1], few[1], flood[2], few[2], flood[3]]

    def test_a_client_with_one_request_waits_for_one_of_each_other_client(self) -> None:
        queue = holding(*(one for name in "abcd" for one in some(100, client=name)))
        for number in range(20):
            queue.add(mine := queued(f"mine-{number}", client="me"))
            assert serve(queue, 5).count(mine) == 1

    def test_without_turns_the_order_of_arrival_counts(self) -> None:
        requests = [*some(5, client="ann"), *some(2, client="bob"), *some(1, client="cy")]
        requests = [replace(one, turn="") for one in requests]
        assert serve(holding(*requests), 8, batch=3) == requests

    @given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 9))
    def test_every_request_is_served_once(self, clients: list[str], batch: int) -> None:
        requests = [
            queued(f"{number}", PRIORITY_CLASSES[number % 3], client)
            for number, client in enumerate(clients)
        ]
        queue = holding(*requests)

        served = serve(queue, len(requests), batch)

        assert sorted(one.entry for one in served) == sorted(one.entry for one in requests)
        assert (len(queue), queue.tokens, list(queue)) == (0, 0, [])

    def test_the_number_of_competing_clients(self) -> None:
        queue = holding(*some(9, client="ann"), *some(1, client="bob"), *some(1, "high", "cy"))
        assert queue.clients == 2
