"""Several models in one yard: none hides another, and the demand for each is known."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

import coordinator.recovery.sweeper
import coordinator.roster
from coordinator.coordinator import Coordinator
from coordinator.dispatch.admission import refuse
from coordinator.dispatch.entries import Entry
from tests.integration.operating import Opened
from tests.support.builders import make_request, worker_json
from tests.support.lanes import LONG_MS, Lanes
from tests.support.waiting import eventually
from tokenyard.clock import BrokerTime
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import CLASS_WEIGHTS
from tokenyard.protocol.replies import to_result
from tokenyard.protocol.wire import Request
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, encode_host

#: Places in which each class has its share.
ROUND = sum(CLASS_WEIGHTS.values())


class Yard(Lanes):
    """A yard whose host may load several models."""

    def host(self, *models: str, **adapters: str) -> str:
        """A host with a warm worker; ``adapters`` by name with their base models."""
        offered = [
            ModelInfo(name=one, adapters=[name for name, base in adapters.items() if base == one])
            for one in models
        ]
        self.connection.hset(
            self.keys.hosts, "host", encode_host(HostInfo(name="host", models=offered))
        )
        info = worker_json("warm", state="warm", model="", controller="host")
        return self.scripts.register("warm", LONG_MS, info)

    def ask(self, model: str, count: int, priority_class: Any = "normal", **more: Any) -> list[str]:
        """Requests for a model; their ids sort in their order."""
        return self.push(_requests(model, count, priority_class, **more), priority_class)

    def info(self, name: str) -> Any:
        return msgspec.json.decode(self.connection.hget(self.keys.info, name) or b"null")


def _requests(model: str, count: int, prefix: str, **more: Any) -> list[Request]:
    return [make_request(f"{model}-{prefix}{at:04}", model=model, **more) for at in range(count)]


def turns(leading: Coordinator, count: int) -> None:
    for _ in range(count):
        leading.run_once()


def demands(leading: Coordinator) -> dict[str, tuple[int, int]]:
    """Requests and tokens that wait, by model."""
    return {one.model: (one.requests, one.tokens) for one in leading._dispatcher.demands()}


@pytest.fixture
def yard(opened: Opened) -> Yard:
    return opened(Yard)


class TestNoneHidesAnother:
    def test_requests_run_behind_many_for_a_model_without_workers(self, yard: Yard) -> None:
        yard.host("a", "b")
        worker = yard.worker("b", model="b")
        yard.coordinator(max_batch=8, static=True)

        yard.ask("a", 200)
        ids = yard.ask("b", 3)

        assert yard.wait_for_load(worker, 3) == ids
        assert yard.waiting() == 200

    @pytest.mark.parametrize(
        "settings",
        [{"max_batch": 8}, {"max_batch": 8, "deterministic": True, "expect_workers": 2}],
        ids=["as they come", "deterministic"],
    )
    def test_requests_run_behind_many_for_a_full_model(
        self, yard: Yard, settings: dict[str, Any]
    ) -> None:
        full = yard.worker("a", lane_limit=1, model="a")
        free = yard.worker("b", model="b")
        yard.coordinator(**settings)

        first = yard.ask("a", 200)
        ids = yard.ask("b", 3)

        assert yard.wait_for_load(free, 3) == ids
        assert yard.ids(full) == first[:1]

    def test_requests_run_behind_many_for_a_model_that_has_left(self, yard: Yard) -> None:
        # Given a yard that knows a model that no host may load now
        worker = yard.worker("a", model="a")
        leading = yard.take_lead(max_batch=8)
        yard.scripts.retire(worker, "left")
        free = yard.worker("b", model="b")
        turns(leading, 2)

        # If there are more requests for it than are read ahead, and others after them
        yard.ask("a", 100)
        ids = yard.ask("b", 3)

        eventually(lambda: (leading.run_once(), yard.load(free) == 3)[1])
        assert yard.ids(free) == ids

    def test_models_take_turns_where_a_batch_is_too_small_for_all(self, yard: Yard) -> None:
        # Given far more requests for two models than one turn dispatches
        yard.host("a", "b")
        leading = yard.take_lead(max_batch=4)
        yard.ask("a", 8)
        yard.ask("b", 8)
        turns(leading, 6)

        # If both have a worker
        workers = [yard.worker(name, model=name) for name in "ab"]
        turns(leading, 1)  # reads the events

        # I expect neither to have to wait until the other has had all of its own.
        loads = []
        for _ in range(4):
            turns(leading, 1)
            loads.append([yard.load(worker) for worker in workers])
        assert loads == [[4, 0], [4, 4], [8, 4], [8, 8]]

    @pytest.mark.long
    def test_low_is_not_starved_in_either_of_two_models(self, yard: Yard) -> None:
        # Given two models that are served in turns, one request each time
        yard.host("a", "b")
        leading = yard.take_lead(max_batch=1)
        for model in "ab":
            yard.ask(model, 3 * ROUND, "high")
            yard.ask(model, 1, "low")
        eventually(lambda: (leading.run_once(), len(leading._intake.backlog) == 6 * ROUND + 2)[1])
        workers = {name: yard.worker(name, model=name) for name in "ab"}
        turns(leading, 1)  # reads the events

        turns(leading, 2 * ROUND)

        for name, worker in workers.items():
            assert f"{name}-low0000" in yard.ids(worker)


class TestDemand:
    def test_demand_is_known_in_the_turn_that_reads_a_request(self, yard: Yard) -> None:
        yard.host("a", "b")
        leading = yard.take_lead()

        yard.ask("a", 2)
        yard.ask("b", 1, tokens=[1] * 10)
        turns(leading, 1)

        assert demands(leading) == {"a": (2, 6), "b": (1, 10)}
        waits = [one.oldest_wait_s for one in leading._dispatcher.demands()]
        assert all(0.0 <= wait < 10.0 for wait in waits)

    def test_dispatched_requests_are_no_demand(self, yard: Yard) -> None:
        yard.host("a", "b")
        leading = yard.take_lead()
        yard.ask("a", 5)
        turns(leading, 1)

        yard.worker("a", model="a", lane_limit=2)
        turns(leading, 2)

        assert demands(leading) == {"a": (3, 9)}

    def test_cancelled_requests_are_no_demand(self, yard: Yard) -> None:
        # Given requests for a model that no worker holds
        yard.host("a", "b")
        leading = yard.take_lead()
        submitted = _requests("a", 6, "s")
        yard.scripts.submit("normal", submitted)
        turns(leading, 2)
        assert demands(leading) == {"a": (6, 18)}

        # If some are cancelled
        for request in submitted[::2]:
            yard.scripts.cancel(request.client, request.id, "not wanted")

        # I expect the rest to count, and to be served in order.
        eventually(lambda: (leading.run_once(), demands(leading) == {"a": (3, 9)})[1])
        worker = yard.worker("a", model="a")
        eventually(lambda: (leading.run_once(), yard.load(worker) == 3)[1])
        assert yard.ids(worker) == [request.id for request in submitted[1::2]]

    def test_requests_answered_by_another_leave_the_backlog(self, yard: Yard) -> None:
        # Given a queued request that the sweeper finds
        yard.host("a", "b")
        leading = yard.take_lead()
        (name,) = yard.ask("a", 1)
        turns(leading, 1)
        (waiting,) = leading._intake.backlog.queue("a")

        entry = Entry(waiting.intake, waiting.entry, {})
        refused = refuse(waiting, Code.QUEUE_FULL, "no room")
        leading._dispatcher.answer(leading._leadership.token, entry, refused)

        assert (demands(leading), len(leading._intake.backlog)) == ({}, 0)
        assert to_result(yard.result(name)).error.message == "no room"


class TestNames:
    def test_the_handshake_names_models_that_a_host_may_load(self, yard: Yard) -> None:
        yard.host("a", "b", roman="a")
        yard.take_lead()

        assert yard.info("models") == ["a", "b", "roman"]
        assert yard.info("adapters") == {"roman": "a"}
        assert yard.connection.hget(yard.keys.info, "default_model") == b""

    def test_one_model_is_the_default_whatever_its_adapters(self, yard: Yard) -> None:
        yard.host("a", roman="a")
        leading = yard.take_lead()

        yard.push([make_request("r")])
        turns(leading, 1)

        assert yard.connection.hget(yard.keys.info, "default_model") == b"a"
        assert demands(leading) == {"a": (1, 3)}

    def test_a_request_for_an_adapter_goes_to_its_base_model(self, yard: Yard) -> None:
        yard.host("a", "b", roman="a")
        base, other = yard.worker("a", model="a"), yard.worker("b", model="b")
        leading = yard.take_lead()

        ids = yard.ask("roman", 2)
        turns(leading, 2)

        assert (yard.ids(base), yard.ids(other)) == (ids, [])
        assert {one.request.model for one in yard.lane(base)} == {"roman"}

    @pytest.mark.parametrize("model", ["c", ""])
    def test_an_unknown_model_is_refused(self, yard: Yard, model: str) -> None:
        yard.host("a", "b", roman="a")
        leading = yard.take_lead()

        yard.push([make_request("r", model=model)])
        turns(leading, 1)

        error = to_result(yard.result("r")).error
        assert error.code == "MODEL_UNAVAILABLE"
        assert error.message.endswith("served: a, b, roman")

    def test_models_stay_known_when_their_host_is_absent(self, yard: Yard) -> None:
        # Given a host that has gone, and a coordinator that has never seen it
        warm = yard.host("a", "b", roman="a")
        yard.take_lead()._close()
        yard.scripts.retire(warm, "left")
        leading = yard.take_lead(name="next")

        yard.ask("roman", 2)
        turns(leading, 1)

        assert demands(leading) == {"a": (2, 6)}
        assert yard.info("adapters") == {"roman": "a"}

    def test_requests_wait_for_a_model_whose_hosts_are_gone_while_others_are_there(
        self, yard: Yard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a coordinator that never saw the host that could load `a`, and a host with `b`
        gone = ModelInfo(name="a", adapters=["roman"])
        yard.scripts.publish_host(HostInfo(name="gone", models=[gone]))
        yard.host("b")
        leading = yard.take_lead(static=False)
        assert yard.info("models") == ["a", "b", "roman"]
        assert yard.connection.hget(yard.keys.info, "default_model") == b"b"

        ids = [*yard.ask("a", 1), *yard.ask("roman", 1)]
        turns(leading, 2)
        monkeypatch.setattr(BrokerTime, "now_ms", time.time() * 1000 + 300_000.0)
        turns(leading, 3)
        assert demands(leading) == {"a": (2, 6)}

        # If a host comes, I expect it to serve them.
        worker = yard.worker("w", model="a", controller="new")
        eventually(lambda: (leading.run_once(), yard.load(worker) == 2)[1])
        assert sorted(yard.ids(worker)) == sorted(ids)

    def test_early_requests_are_admitted_again_once_models_are_known(self, yard: Yard) -> None:
        # Given requests that came before the first host
        leading = yard.take_lead()
        yard.ask("roman", 1)
        yard.ask("c", 1)
        yard.push([make_request("none")])
        turns(leading, 2)
        assert (demands(leading), yard.waiting()) == ({}, 3)

        yard.host("a", roman="a")
        turns(leading, 2)

        assert demands(leading) == {"a": (2, 6)}
        assert to_result(yard.result("c-normal0000")).error.code == "MODEL_UNAVAILABLE"


class TestGivenUp:
    def test_requests_for_a_hopeless_model_are_refused(self, yard: Yard) -> None:
        # Given requests of all classes for a model, and for another
        yard.host("a", "b", roman="a")
        leading = yard.take_lead(max_batch=4)
        ids = yard.ask("a", 6) + yard.ask("roman", 1, "low") + yard.ask("a", 2, "high")
        yard.ask("b", 2)
        turns(leading, 4)
        assert demands(leading) == {"a": (9, 27), "b": (2, 6)}

        # If its loading is given up, I expect a batch to be answered each time, and the others
        # to wait on.
        left = []
        for _ in range(4):
            leading._dispatcher.fail_model(leading._leadership.token, "a", "no such file")
            left.append(demands(leading).get("a", (0, 0))[0])
        assert left == [5, 1, 0, 0]
        for name in ids:
            error = to_result(yard.result(name)).error
            assert (error.code, error.message) == ("MODEL_UNAVAILABLE", "model: a: no such file")
        assert demands(leading) == {"b": (2, 6)}
        assert yard.waiting() == 2


class TestDeadlines:
    def test_a_turn_answers_at_most_a_batch_of_late_requests(
        self, yard: Yard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given ten requests that become late in the backlog, and no sweeper
        monkeypatch.setattr(coordinator.recovery.sweeper, "EVERY_S", 1e9)
        yard.host("a", "b")
        leading = yard.take_lead(max_batch=4)
        deadline_ms = int(time.time() * 1000) + 60_000
        ids = yard.ask("a", 10, deadline_ms=deadline_ms)
        turns(leading, 4)
        assert len(leading._intake.backlog) == 10
        monkeypatch.setattr(BrokerTime, "now_ms", deadline_ms + 1.0)

        assert demands(leading) == {}
        left = []
        for _ in range(3):
            turns(leading, 1)
            left.append(yard.waiting())

        assert left == [6, 2, 0]
        assert {to_result(yard.result(name)).error.code for name in ids} == {"DEADLINE_EXCEEDED"}
