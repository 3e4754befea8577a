"""The placement with pending loads, failed loads and hopeless models."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.placement.decide import PATIENCE_GONE_S, PATIENCE_S, PendingLoad, Situation, place
from tests.support.situations import NOW_MS, WAIT_S, decide, demand, host, loads, worker
from tokenyard.protocol.control import Command
from tokenyard.protocol.worker_info import HostInfo


class TestOrdersUnderWay:
    def order(
        self, model: str = "a", name: str = "w.1", given_s: float = 1.0, **values: Any
    ) -> PendingLoad:
        command = Command(verb="load", worker=name, model=model)
        return PendingLoad(command, [("h", 0)], NOW_MS - 1000 * given_s, **values)

    def test_a_pending_load_is_not_commanded_again(self) -> None:
        workers = [worker("w.1"), worker("x.2", device=1)]
        demands = [demand("a"), demand("b")]
        first = decide(demands, workers[:1])

        again = decide(demands, workers[:1], pending=first.pending)
        assert again.commands == []
        assert again.pending == first.pending

        other = decide(demands, workers, pending=first.pending)
        assert len(other.commands) == 1
        assert other.commands[0].worker == "x.2"
        assert {one.command.model for one in other.pending} == {"a", "b"}

    def test_a_model_that_gives_way_does_not_count_as_served(self) -> None:
        """Given a worker commanded to swap, I expect its old model to get another device."""
        workers = [worker("w.1", "b", load=2), worker("x.2", device=1)]

        placement = decide([demand("b")], workers, pending=[self.order()])

        assert loads(placement) == [("x.2", "b")]

    @pytest.mark.parametrize("state", ["loading", "ready"])
    def test_a_pending_load_ends_when_the_roster_shows_the_model(self, state: str) -> None:
        """Also under another incarnation, and another name: the device's spare may have it."""
        placement = decide([], [worker("spare.9", "a", state=state)], pending=[self.order()])

        assert placement.pending == []

    @pytest.mark.parametrize("old", ["r.1", "t.1"])
    def test_a_pending_load_ends_before_the_old_model_is_gone(self, old: str) -> None:
        workers = [worker(old, "b", state="unloading"), worker("s.9", "a", state="loading")]

        assert decide([], workers, pending=[self.order()]).pending == []

    def test_a_load_is_pending_while_the_old_model_leaves(self) -> None:
        for state in ("draining", "unloading"):
            workers = [worker("w.7", "b", state=state)]
            placement = decide([demand("a")], workers, pending=[self.order(given_s=9_999)])
            assert placement.commands == []
            assert len(placement.pending) == 1

    def test_a_pending_load_ends_after_three_loads_and_a_minute(self) -> None:
        hosts = host(a={"load_s": 10.0})
        for given_s, expected in ((PATIENCE_S + 29, 1), (PATIENCE_S + 31, 0)):
            pending = [self.order(given_s=given_s)]
            assert len(decide([], [worker("w.1")], hosts, pending).pending) == expected

    def test_a_pending_load_ends_soon_where_the_worker_is_gone(self) -> None:
        for given_s, expected in ((PATIENCE_GONE_S - 1, 1), (PATIENCE_GONE_S + 1, 0)):
            pending = [self.order(given_s=given_s)]
            assert len(decide([], [worker("w.2")], pending=pending).pending) == expected

    def test_a_pending_load_ends_where_the_host_is_gone(self) -> None:
        assert decide([], [], host("i"), [self.order()]).pending == []

    def test_a_pending_load_ends_when_it_has_failed(self) -> None:
        faulted_ms = int(NOW_MS - 500)
        hosts = host(a={"fault": "no file", "faults": 1, "faulted_ms": faulted_ms})

        assert decide([], [worker("w.1")], hosts, [self.order()]).pending == []
        known = self.order(faulted_ms=faulted_ms)
        assert decide([], [worker("w.1")], hosts, [known]).pending == [known]


def faulty(faults: int, ago_s: float, name: str = "h") -> dict[str, HostInfo]:
    faulted_ms = int(NOW_MS - 1000 * ago_s)
    fault = {"fault": f"no file on {name}", "faults": faults, "faulted_ms": faulted_ms}
    return host(name, a=fault)


class TestFaults:
    @pytest.mark.parametrize(("faults", "pause_s"), [(1, 2), (2, 4), (5, 32), (9, 60)])
    def test_a_failed_load_is_tried_again_after_growing_pauses(
        self, faults: int, pause_s: float
    ) -> None:
        for ago_s, expected in ((pause_s - 0.1, []), (pause_s + 0.1, [("w.1", "a")])):
            placement = decide([demand("a")], [worker("w.1")], faulty(faults, ago_s))
            assert loads(placement) == expected

    def test_another_host_tries_a_failed_load_meanwhile(self) -> None:
        hosts = faulty(2, 1) | host("i", a={})
        workers = [worker("v.1"), worker("w.2", controller="i", idle_s=1)]

        assert loads(decide([demand("a")], workers, hosts)) == [("w.2", "a")]

    def test_requests_wait_while_a_load_may_still_succeed(self) -> None:
        assert decide([demand("a")], [worker("w.1")], faulty(2, 1)).hopeless == {}
        hosts = faulty(3, 1) | faulty(2, 1, "i")
        assert decide([demand("a")], [worker("w.1")], hosts).hopeless == {}

    def test_a_model_is_hopeless_after_three_failures_on_every_host(self) -> None:
        hosts = faulty(3, 2) | faulty(4, 1, "i")

        placement = decide([demand("a")], [worker("w.1")], hosts)

        assert placement.hopeless == {
            "a": "it could not be loaded, 4 times in a row on i: no file on i"
        }
        assert placement.commands == []

    def test_a_hopeless_model_is_tried_once_more_after_the_pause(self) -> None:
        placement = decide([demand("a")], [worker("w.1")], faulty(3, 9))

        assert placement.hopeless == {}
        assert loads(placement) == [("w.1", "a")]

    def test_a_model_with_a_worker_is_not_hopeless(self) -> None:
        workers = [worker("v.1", "a", load=4), worker("w.2", device=1)]

        assert decide([demand("a", 9)], workers, faulty(3, 1)).hopeless == {}


class TestHopeless:
    def test_a_model_that_no_host_lists_is_hopeless(self) -> None:
        """A host may only be about to come back, so I expect its requests to wait first."""
        assert decide([demand("x", wait_s=WAIT_S - 1)], [worker("w.1")]).hopeless == {}
        assert decide([demand("x", wait_s=WAIT_S)], [worker("w.1")]).hopeless == {
            "x": "no host that is there may load it"
        }

    def test_a_model_too_large_for_every_host_is_hopeless(self) -> None:
        hosts = host("h", 2, big={"ranks": 4}) | host("i", 3, big={"ranks": 4})

        assert decide([demand("big", wait_s=99)], [worker("w.1")], hosts).hopeless == {
            "big": "it takes 4 devices of one host, and the hosts that may load it have 3"
        }

    def test_a_model_is_hopeless_where_pinned_models_keep_all_devices(self) -> None:
        hosts = host(devices=1, a={}, b={"pin": 1})
        starving = [demand("a", wait_s=99)]

        assert decide(starving, [worker("w.1", "b")], hosts).hopeless == {
            "a": "pinned models keep the devices of all hosts that may load it"
        }
        two = host(devices=2, a={}, b={"pin": 1})
        assert decide(starving, [worker("w.1", "b")], two).hopeless == {}

    def test_a_model_whose_only_device_was_given_away_is_not_hopeless(self) -> None:
        # Given more requests for a model than its lane takes, and another model that is due
        demands = [demand("a", wait_s=99), demand("b", 9, wait_s=98)]

        placement = decide(demands, [worker("w.1", "b", load=4)], host(devices=1, a={}, b={}))

        assert loads(placement) == [("w.1", "a")]
        assert placement.hopeless == {}

    def test_a_model_that_waits_for_a_device_or_a_host_is_not_hopeless(self) -> None:
        starving = [demand("a", wait_s=99)]

        assert decide(starving, [worker("w.1", "b", swapped_s=1)]).hopeless == {}
        assert decide(starving, [worker("w.1", "b", load=1)], faulty(3, 9)).hopeless == {}
        assert decide([demand("x", wait_s=99)], [], {}).hopeless == {}

    def test_a_model_whose_hosts_are_gone_waits_for_them(self) -> None:
        gone = [*host("gone", x={}, set={"max_model_wait_s": 50.0}).values()]
        demands = [demand("x", wait_s=10**6), demand("set", wait_s=49.0)]

        def hopeless(wait_s: float = 0.0) -> dict[str, str]:
            waits = Situation(demands, [worker("w.1")], host(), NOW_MS, wait_s, gone=gone)
            return place(waits).hopeless

        # A setting ends the wait, that of the model before that of the coordinator.
        assert hopeless() == {}
        assert list(hopeless(WAIT_S)) == ["x"]
        demands[1] = demand("set", wait_s=50.0)
        assert hopeless() == {"set": "no host that is there may load it"}
