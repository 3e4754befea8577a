"""Which worker should hold which model: the rules of the placement, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from coordinator.demand import Demand
from coordinator.devices import Worker
from coordinator.placement import (
    PATIENCE_GONE_S,
    PATIENCE_S,
    Order,
    Placement,
    Situation,
    place,
)
from tokenyard.commands import Command
from tokenyard.worker_info import HostInfo, ModelInfo, WorkerInfo

NOW_MS = 1_000_000_000.0
WAIT_S = 30.0


def demand(model: str, requests: int = 1, wait_s: float = 0.0) -> Demand:
    return Demand(model, requests, 10 * requests, wait_s)


def worker(
    name: str,
    model: str = "",
    *,
    state: str = "",
    load: int = 0,
    idle_s: float = 1_000.0,
    since_s: float = 2_000.0,
    swapped_s: float | None = None,
    **info: Any,
) -> Worker:
    """A worker of device 0 of host `h`; ready where it has a model, else warm."""
    values: dict[str, Any] = {
        "name": name.rpartition(".")[0],
        "state": state or ("ready" if model else "warm"),
        "model": model,
        "controller": "h",
        "lane_limit": 4,
        "since_ms": int(NOW_MS - 1000 * since_s),
        "swapped_ms": 0 if swapped_s is None else int(NOW_MS - 1000 * swapped_s),
    }
    worked_ms = NOW_MS if load else NOW_MS - 1000 * idle_s
    return Worker(name, WorkerInfo(**(values | info)), load, worked_ms)


def host(name: str = "h", devices: int = 8, **models: Mapping[str, Any]) -> dict[str, HostInfo]:
    """A host that may load `a`, `b` and `c`, or the models given."""
    offers = models or {"a": {}, "b": {}, "c": {}}
    infos = [ModelInfo(name=model, **values) for model, values in offers.items()]
    return {name: HostInfo(name=name, devices=devices, models=infos)}


def decide(
    demands: Sequence[Demand],
    workers: Sequence[Worker],
    hosts: Mapping[str, HostInfo] | None = None,
    orders: Sequence[Order] = (),
) -> Placement:
    hosts = host() if hosts is None else hosts
    return place(Situation(demands, workers, hosts, NOW_MS, WAIT_S, orders))


def loads(placement: Placement) -> list[tuple[str, str]]:
    """Who is to load what."""
    assert all(command.verb == "load" and command.why for command in placement.commands)
    return [(command.worker, command.model) for command in placement.commands]


class TestColdModel:
    def test_the_first_request_makes_a_warm_worker_load_at_once(self) -> None:
        placement = decide([demand("a")], [worker("w.1")])

        assert loads(placement) == [("w.1", "a")]
        assert placement.commands[0].why == (
            "nobody holds it and 1 request waited up to 0.0 s; a device is free"
        )

    def test_nothing_is_loaded_that_nobody_wants(self) -> None:
        assert loads(decide([], [worker("w.1")])) == []
        assert loads(decide([demand("a", 0)], [worker("w.1")])) == []

    @pytest.mark.parametrize("state", ["loading", "ready"])
    def test_a_worker_that_has_it_or_loads_it_is_enough(self, state: str) -> None:
        workers = [worker("v.1", "a", state=state, load=4), worker("w.2", device=1)]

        assert loads(decide([demand("a", 2)], workers)) == []

    @pytest.mark.parametrize("state", ["warming", "failed", "draining", "unloading", "attached"])
    def test_a_worker_in_another_state_is_no_candidate(self, state: str) -> None:
        assert loads(decide([demand("a", wait_s=99)], [worker("w.1", state=state)])) == []

    def test_a_device_that_is_taken_up_has_no_room_for_its_spares(self) -> None:
        workers = [worker("v.1", "b", load=1), worker("w.2")]

        assert loads(decide([demand("a")], workers)) == []

    def test_each_of_two_models_gets_a_device_of_its_own(self) -> None:
        workers = [worker("v.1"), worker("w.2", device=1), worker("x.3", device=1)]

        placement = decide([demand("a", wait_s=1), demand("b", wait_s=2)], workers)

        assert sorted(model for _, model in loads(placement)) == ["a", "b"]
        assert len({command.worker for command in placement.commands} - {"x.3"}) == 2

    def test_of_two_models_the_one_that_waits_longest_comes_first(self) -> None:
        demands = [demand("a", 9, wait_s=1), demand("b", 1, wait_s=2)]

        assert loads(decide(demands, [worker("w.1")])) == [("w.1", "b")]

    def test_only_hosts_that_list_the_model_load_it(self) -> None:
        hosts = host("h", a={}) | host("i", b={})
        workers = [worker("v.1", controller="h"), worker("w.2", controller="i")]

        assert loads(decide([demand("b")], workers, hosts)) == [("w.2", "b")]

    def test_a_worker_that_names_no_controller_is_left_alone_and_counts(self) -> None:
        """Given workers of a program that knows no placement, I expect them to serve as they do."""
        workers = [worker("v.1", "a", controller=""), worker("u.2", "b", controller="")]
        workers.append(worker("w.3"))

        assert loads(decide([demand("a")], workers)) == []
        assert loads(decide([demand("c", wait_s=99)], workers)) == [("w.3", "c")]


class TestWhichDevice:
    def test_the_cheapest_is_taken(self) -> None:
        """I expect this order: free and asleep there, free, idle and asleep there, idle."""
        free_asleep = [worker("f.1", device=0), worker("g.2", "a", state="asleep", device=0)]
        free = [worker("h.3", device=1, idle_s=9_000)]
        idle_asleep = [worker("i.4", "b", device=2), worker("j.5", "a", state="asleep", device=2)]
        idle = [worker("k.6", "c", device=3, idle_s=9_000)]
        kinds = [free_asleep, free, idle_asleep, idle]
        expected = ["g.2", "h.3", "i.4", "k.6"]

        for first, name in enumerate(expected):
            workers = [one for kind in kinds[first:] for one in kind]
            assert loads(decide([demand("a")], workers)) == [(name, "a")]

    def test_among_equals_the_one_without_work_for_longest(self) -> None:
        workers = [
            worker("v.1", "b", idle_s=10, device=0),
            worker("w.2", "b", idle_s=30, device=1),
            worker("x.3", "c", idle_s=20, device=2),
        ]

        placement = decide([demand("a")], workers)

        assert loads(placement) == [("w.2", "a")]
        assert placement.commands[0].why.endswith("; b has had no work for 30 s")

    def test_a_worker_never_seen_at_work_counts_from_when_it_was_ready(self) -> None:
        workers = [
            worker("v.1", "b", idle_s=900, since_s=10, device=0),
            worker("w.2", "b", idle_s=900, since_s=20, device=1),
        ]

        assert loads(decide([demand("a")], workers)) == [("w.2", "a")]

    def test_an_idle_worker_whose_model_somebody_waits_for_stays(self) -> None:
        demands = [demand("a", wait_s=2), demand("b", wait_s=1)]

        assert loads(decide(demands, [worker("w.1", "b")])) == []

    def test_an_idle_device_that_has_just_changed_its_model_stays(self) -> None:
        for swapped_s, expected in ((WAIT_S - 1, []), (WAIT_S + 1, [("w.1", "a")])):
            workers = [worker("w.1", "b", swapped_s=swapped_s)]
            assert loads(decide([demand("a")], workers)) == expected

    @pytest.mark.parametrize("spare", ["u.2", "w.2"])
    def test_its_change_shows_also_where_only_a_spare_tells(self, spare: str) -> None:
        workers = [worker("v.1", "b"), worker(spare, swapped_s=1)]

        assert loads(decide([demand("a")], workers)) == []

    @pytest.mark.parametrize("other", ["u.2", "w.2"])
    def test_a_device_between_two_workers_stays(self, other: str) -> None:
        workers = [worker("v.1", "b"), worker(other, "c", state="draining", load=1)]

        assert loads(decide([demand("a", wait_s=99)], workers)) == []

    def test_the_wait_is_that_of_the_model_that_comes(self) -> None:
        hosts = host(a={"max_model_wait_s": 5.0}, b={"max_model_wait_s": 500.0})

        placement = decide([demand("a")], [worker("w.1", "b", swapped_s=6)], hosts)

        assert loads(placement) == [("w.1", "a")]


class TestStarvation:
    def test_a_busy_device_changes_once_a_model_has_waited_for_so_long(self) -> None:
        workers = [worker("w.1", "b", load=3)]

        assert loads(decide([demand("a", wait_s=WAIT_S - 1)], workers)) == []
        placement = decide([demand("a", wait_s=WAIT_S)], workers)

        assert loads(placement) == [("w.1", "a")]
        assert placement.commands[0].why.endswith("; b has had its turn")

    def test_a_free_or_idle_device_is_taken_first(self) -> None:
        busy, idle = worker("v.1", "b", load=1), worker("w.2", "c", device=1)
        free = worker("x.3", device=2)

        assert loads(decide([demand("a", wait_s=99)], [busy, idle])) == [("w.2", "a")]
        assert loads(decide([demand("a", wait_s=99)], [busy, idle, free])) == [("x.3", "a")]

    def test_the_model_with_most_workers_gives_one(self) -> None:
        workers = [worker("u.1", "b", load=1, device=0)]
        workers += [worker(f"v.{n}", "c", load=4, device=n) for n in (2, 3)]

        (load,) = loads(decide([demand("a", wait_s=99)], workers))

        assert load in {("v.2", "a"), ("v.3", "a")}

    def test_then_the_one_that_is_wanted_least(self) -> None:
        workers = [worker("v.1", "b", load=4), worker("w.2", "c", load=3, device=1)]

        assert loads(decide([demand("a", wait_s=99)], workers)) == [("w.2", "a")]
        demands = [demand("a", wait_s=99), demand("c", 2)]
        assert loads(decide(demands, workers)) == [("v.1", "a")]

    def test_a_device_changes_once_in_that_time(self) -> None:
        workers = [worker("w.1", "b", load=3, swapped_s=WAIT_S - 1)]

        assert loads(decide([demand("a", wait_s=500)], workers)) == []

    def test_a_model_serves_for_as_long_as_it_was_loaded(self) -> None:
        """Given a load that takes longer than models wait, I expect some work between two."""
        hosts = host(a={}, b={"load_s": 100.0})
        for since_s, expected in ((99, []), (101, [("w.1", "a")])):
            workers = [worker("w.1", "b", load=3, swapped_s=200, since_s=since_s)]
            assert loads(decide([demand("a", wait_s=99)], workers, hosts)) == expected

    def test_of_two_starving_models_the_one_that_waits_longest(self) -> None:
        demands = [demand("a", 9, wait_s=40), demand("c", 1, wait_s=50)]

        assert loads(decide(demands, [worker("w.1", "b", load=1)])) == [("w.1", "c")]

    def test_a_model_with_a_worker_starves_nobody(self) -> None:
        """Given a model whose own worker is full, I expect it to wait for that one."""
        workers = [worker("v.1", "a", load=4), worker("w.2", "b", load=1, device=1)]

        assert loads(decide([demand("a", 4, wait_s=500)], workers)) == []

    def test_its_own_wait_counts(self) -> None:
        hosts = host(a={"max_model_wait_s": 5.0}, b={})

        assert loads(decide([demand("a", wait_s=6)], [worker("w.1", "b", load=1)], hosts))


class TestMoreWorkers:
    def test_a_queue_longer_than_the_lanes_gets_one_more(self) -> None:
        workers = [worker("v.1", "a", load=4), worker("w.2", device=1), worker("x.3", device=2)]

        assert loads(decide([demand("a", 4)], workers)) == []
        placement = decide([demand("a", 5)], workers)

        assert loads(placement) in ([("w.2", "a")], [("x.3", "a")])
        assert placement.commands[0].why == "5 requests wait for 1 worker; a device is free"

    def test_one_that_is_about_to_come_counts(self) -> None:
        workers = [
            worker("v.1", "a", load=4),
            worker("w.2", "a", state="loading", device=1, lane_limit=2),
            worker("x.3", device=2),
        ]

        assert loads(decide([demand("a", 8)], workers)) == []
        assert loads(decide([demand("a", 9)], workers)) == [("x.3", "a")]

    def test_what_a_lane_takes_is_not_known_before_the_first_is_ready(self) -> None:
        workers = [worker("v.1", "a", state="loading", lane_limit=1), worker("w.2", device=1)]

        assert loads(decide([demand("a", 500)], workers)) == []

    def test_the_idle_worker_of_another_model_is_taken(self) -> None:
        workers = [worker("v.1", "a", load=4), worker("w.2", "b", device=1)]

        assert loads(decide([demand("a", 5)], workers)) == [("w.2", "a")]

    def test_but_not_sooner_than_a_load_takes(self) -> None:
        """Given a queue that may be gone before another worker is up, I expect it to wait."""
        hosts = host(a={"load_s": 7.0}, b={})
        idle = [worker("v.1", "a", load=4), worker("w.2", "b", device=1)]
        free = [worker("v.1", "a", load=4), worker("w.2", device=1)]

        assert loads(decide([demand("a", 5, wait_s=6)], idle, hosts)) == []
        assert loads(decide([demand("a", 5, wait_s=8)], idle, hosts)) == [("w.2", "a")]
        assert loads(decide([demand("a", 5, wait_s=0)], free, hosts)) == [("w.2", "a")]

    def test_nobody_who_is_wanted_gives_way(self) -> None:
        busy = [worker("v.1", "a", load=4), worker("w.2", "b", load=1, device=1)]
        waited_for = [worker("v.1", "a", load=4), worker("w.2", "b", device=1)]

        assert loads(decide([demand("a", 500, wait_s=500)], busy)) == []
        demands = [demand("a", 500, wait_s=500), demand("b", 1)]
        assert loads(decide(demands, waited_for)) == []

    def test_a_cold_model_comes_before_more_of_another(self) -> None:
        workers = [worker("v.1", "a", load=4), worker("w.2", device=1)]
        demands = [demand("a", 500, wait_s=50), demand("b", 1)]

        assert loads(decide(demands, workers)) == [("w.2", "b")]


class TestPins:
    def test_a_pinned_model_is_loaded_though_nobody_asks(self) -> None:
        hosts = host(a={"pin": 2}, b={})
        workers = [worker("v.1"), worker("w.2", device=1), worker("x.3", device=2)]

        (first,) = loads(decide([], workers, hosts))
        assert first[1] == "a"

        workers = [worker("v.1", "a"), worker("w.2", "a", device=1), worker("x.3", device=2)]
        assert loads(decide([], workers, hosts)) == []

    def test_it_comes_before_what_others_wait_for(self) -> None:
        hosts = host(a={"pin": 1}, b={})

        assert loads(decide([demand("b", wait_s=9)], [worker("w.1")], hosts)) == [("w.1", "a")]

    def test_one_decision_gives_it_one_worker_for_whatever_reason(self) -> None:
        workers = [worker("v.1"), worker("w.2", device=1)]

        placement = decide([demand("a", wait_s=99)], workers, host(a={"pin": 2}))

        assert len(placement.commands) == 1

    def test_it_waits_its_turn_for_a_busy_device(self) -> None:
        hosts = host(a={"pin": 1}, b={})
        busy = [worker("w.1", "b", load=1)]

        assert loads(decide([], busy, hosts)) == []
        assert loads(decide([demand("a", wait_s=31)], busy, hosts)) == [("w.1", "a")]

    def test_its_last_workers_stay(self) -> None:
        hosts = host(a={"pin": 1}, b={})
        starving = [demand("b", wait_s=99)]
        two = [worker("v.1", "a"), worker("w.2", "a", load=1, device=1)]

        assert loads(decide(starving, two[:1], hosts)) == []
        assert loads(decide(starving, two, hosts)) == [("v.1", "b")]

    def test_one_decision_takes_no_more_than_may_go(self) -> None:
        hosts = host(a={"pin": 1}, b={}, c={})
        workers = [worker("v.1", "a"), worker("w.2", "a", device=1)]

        placement = decide([demand("b"), demand("c")], workers, hosts)

        assert len(placement.commands) == 1


class TestGroups:
    HOSTS = host(devices=4, big={"ranks": 2}, b={}, c={})

    def test_devices_of_one_host_the_leaders_first(self) -> None:
        hosts = host("h", 1, big={"ranks": 2}) | host("i", 2, big={"ranks": 2})
        workers = [
            worker("u.1", controller="h"),
            worker("v.2", controller="i", device=1),
            worker("w.3", controller="i", device=0),
        ]

        placement = decide([demand("big")], workers, hosts)

        assert loads(placement) == [("w.3", "big")]
        assert placement.commands[0].devices == [0, 1]

    def test_free_devices_first_then_those_without_work_for_longest(self) -> None:
        workers = [
            worker("v.1", "b", idle_s=5, device=0),
            worker("w.2", device=1),
            worker("x.3", "c", idle_s=50, device=2),
        ]

        placement = decide([demand("big")], workers, self.HOSTS)

        assert placement.commands[0].devices == [1, 2]

    def test_too_few_devices_to_give(self) -> None:
        workers = [worker("v.1"), worker("w.2", "b", load=1, device=1)]

        assert loads(decide([demand("big", wait_s=29)], workers, self.HOSTS)) == []
        placement = decide([demand("big", wait_s=30)], workers, self.HOSTS)
        assert placement.commands[0].devices == [0, 1]

    def group(self, state: str = "ready", load: int = 0) -> list[Worker]:
        names = ["v", "w"]
        return [
            worker("v.1", "big", state=state, load=load, group=names, device=0),
            worker("w.2", "big", state="attached", group=names, device=1),
            worker("s.3", device=1),
        ]

    def test_it_is_one_holder(self) -> None:
        assert loads(decide([demand("big", 2)], self.group(load=1), self.HOSTS)) == []

    def test_its_devices_are_no_free_ones(self) -> None:
        assert loads(decide([demand("b")], self.group(load=1), self.HOSTS)) == []
        loading = self.group("loading")
        assert loads(decide([demand("b", wait_s=99)], loading, self.HOSTS)) == []

    def test_not_even_while_a_follower_is_not_shown_as_attached(self) -> None:
        leader, follower, _ = self.group("loading")
        shown_late = worker("w.2", device=1)
        assert follower.info.name == shown_late.info.name

        assert loads(decide([demand("b")], [leader, shown_late], self.HOSTS)) == []

    def test_what_is_left_of_a_group_is_no_free_device(self) -> None:
        _, follower, spare = self.group()

        assert loads(decide([demand("b", wait_s=99)], [follower, spare], self.HOSTS)) == []

    def test_it_gives_way_as_a_whole(self) -> None:
        placement = decide([demand("b"), demand("c")], self.group(), self.HOSTS)

        assert len(placement.commands) == 1
        assert placement.commands[0].worker == "v.1"
        assert placement.commands[0].devices == []

    def test_one_device_gives_way_rather_than_a_group(self) -> None:
        workers = [*self.group(), worker("x.4", "c", idle_s=1, device=2)]

        assert loads(decide([demand("b")], workers, self.HOSTS)) == [("x.4", "b")]

    def test_a_group_takes_another_groups_place_whole(self) -> None:
        hosts = host(devices=3, big={"ranks": 2}, other={"ranks": 2}, b={})
        workers = [*self.group(), worker("x.4", "b", idle_s=1_001, device=2)]

        placement = decide([demand("other")], workers, hosts)

        assert placement.commands[0].devices == [0, 1]

    def test_one_that_is_due_gathers_its_devices(self) -> None:
        """Given devices that change by turns, I expect a group to get two at the same time."""
        hosts = host(devices=2, big={"ranks": 2}, b={}, c={}, d={}, e={})
        workers = [
            worker("v.1", "b", load=1, swapped_s=31, device=0),
            worker("w.2", "c", load=1, swapped_s=16, device=1),
        ]
        others = [demand("d", wait_s=40)]

        assert loads(decide([demand("big", wait_s=20), *others], workers, hosts))
        assert loads(decide([demand("big", wait_s=50), *others], workers, hosts)) == []
        # But not for ever, if it never comes to that.
        assert loads(decide([demand("big", wait_s=121), *others], workers, hosts))

    def test_it_does_not_gather_what_is_broken(self) -> None:
        """Given three devices of which one never comes up, I expect the other two to be kept."""
        hosts = host(devices=3, big={"ranks": 2}, b={}, c={}, d={"max_model_wait_s": 10.0})
        workers = [
            worker("u.1", state="failed", device=0),
            worker("v.2", "b", load=1, swapped_s=31, device=1),
            worker("w.3", "c", load=1, swapped_s=16, device=2),
        ]
        others = [demand("d", wait_s=40)]

        assert loads(decide(others, workers, hosts))
        assert loads(decide([demand("big", wait_s=50), *others], workers, hosts)) == []

    def test_the_worker_to_command_is_a_leader_where_there_is_one(self) -> None:
        names = ["w", "v"]
        hosts = host(devices=2, big={"ranks": 2}, other={"ranks": 2})
        workers = [
            worker("v.1", "big", state="attached", group=names, device=0),
            worker("w.2", "big", group=names, device=1),
        ]

        placement = decide([demand("other")], workers, hosts)

        assert loads(placement) == [("w.2", "other")]
        assert placement.commands[0].devices == [1, 0]

    def test_what_it_cannot_get_together_is_not_kept(self) -> None:
        hosts = host(devices=2, big={"ranks": 2}, b={"pin": 1}, d={})
        workers = [worker("v.1", "b"), worker("w.2", device=1)]

        placement = decide([demand("big", wait_s=50), demand("d", wait_s=40)], workers, hosts)

        assert loads(placement) == [("w.2", "d")]


class TestOrdersUnderWay:
    def order(
        self, model: str = "a", name: str = "w.1", given_s: float = 1.0, **values: Any
    ) -> Order:
        command = Command(verb="load", worker=name, model=model)
        return Order(command, [("h", 0)], NOW_MS - 1000 * given_s, **values)

    def test_a_device_is_not_commanded_twice_nor_a_model_ordered_twice(self) -> None:
        workers = [worker("w.1"), worker("x.2", device=1)]
        demands = [demand("a"), demand("b")]
        first = decide(demands, workers[:1])

        again = decide(demands, workers[:1], orders=first.orders)
        assert again.commands == []
        assert again.orders == first.orders

        other = decide(demands, workers, orders=first.orders)
        assert len(other.commands) == 1
        assert other.commands[0].worker == "x.2"
        assert {one.command.model for one in other.orders} == {"a", "b"}

    def test_what_gives_way_serves_no_more(self) -> None:
        """Given a worker that was told to swap, I expect its model to find another place."""
        workers = [worker("w.1", "b", load=2), worker("x.2", device=1)]

        placement = decide([demand("b")], workers, orders=[self.order()])

        assert loads(placement) == [("x.2", "b")]

    @pytest.mark.parametrize("state", ["loading", "ready"])
    def test_over_when_the_roster_shows_the_model(self, state: str) -> None:
        """Also under another incarnation, and another name: the device's spare may have it."""
        placement = decide([], [worker("spare.9", "a", state=state)], orders=[self.order()])

        assert placement.orders == []

    @pytest.mark.parametrize("old", ["r.1", "t.1"])
    def test_over_also_before_the_old_one_is_gone(self, old: str) -> None:
        workers = [worker(old, "b", state="unloading"), worker("s.9", "a", state="loading")]

        assert decide([], workers, orders=[self.order()]).orders == []

    def test_under_way_while_the_old_model_gives_way(self) -> None:
        for state in ("draining", "unloading"):
            workers = [worker("w.7", "b", state=state)]
            placement = decide([demand("a")], workers, orders=[self.order(given_s=9_999)])
            assert placement.commands == []
            assert len(placement.orders) == 1

    def test_over_after_thrice_the_time_of_a_load_and_a_minute(self) -> None:
        hosts = host(a={"load_s": 10.0})
        for given_s, expected in ((PATIENCE_S + 29, 1), (PATIENCE_S + 31, 0)):
            orders = [self.order(given_s=given_s)]
            assert len(decide([], [worker("w.1")], hosts, orders).orders) == expected

    def test_over_soon_where_the_worker_is_gone(self) -> None:
        for given_s, expected in ((PATIENCE_GONE_S - 1, 1), (PATIENCE_GONE_S + 1, 0)):
            orders = [self.order(given_s=given_s)]
            assert len(decide([], [worker("w.2")], orders=orders).orders) == expected

    def test_over_where_the_host_is_gone(self) -> None:
        assert decide([], [], host("i"), [self.order()]).orders == []

    def test_over_when_the_load_has_failed(self) -> None:
        faulted_ms = int(NOW_MS - 500)
        hosts = host(a={"fault": "no file", "faults": 1, "faulted_ms": faulted_ms})

        assert decide([], [worker("w.1")], hosts, [self.order()]).orders == []
        known = self.order(faulted_ms=faulted_ms)
        assert decide([], [worker("w.1")], hosts, [known]).orders == [known]


class TestFaults:
    def faulty(self, faults: int, ago_s: float, name: str = "h") -> dict[str, HostInfo]:
        faulted_ms = int(NOW_MS - 1000 * ago_s)
        fault = {"fault": f"no file on {name}", "faults": faults, "faulted_ms": faulted_ms}
        return host(name, a=fault)

    @pytest.mark.parametrize(("faults", "pause_s"), [(1, 2), (2, 4), (5, 32), (9, 60)])
    def test_it_is_tried_again_after_growing_pauses(self, faults: int, pause_s: float) -> None:
        for ago_s, expected in ((pause_s - 0.1, []), (pause_s + 0.1, [("w.1", "a")])):
            placement = decide([demand("a")], [worker("w.1")], self.faulty(faults, ago_s))
            assert loads(placement) == expected

    def test_another_host_tries_it_meanwhile(self) -> None:
        hosts = self.faulty(2, 1) | host("i", a={})
        workers = [worker("v.1"), worker("w.2", controller="i", idle_s=1)]

        assert loads(decide([demand("a")], workers, hosts)) == [("w.2", "a")]

    def test_requests_wait_while_it_may_still_come(self) -> None:
        assert decide([demand("a")], [worker("w.1")], self.faulty(2, 1)).hopeless == {}
        hosts = self.faulty(3, 1) | self.faulty(2, 1, "i")
        assert decide([demand("a")], [worker("w.1")], hosts).hopeless == {}

    def test_after_three_on_every_host_it_cannot_be_had(self) -> None:
        hosts = self.faulty(3, 2) | self.faulty(4, 1, "i")

        placement = decide([demand("a")], [worker("w.1")], hosts)

        assert placement.hopeless == {
            "a": "it could not be loaded, 4 times in a row on i: no file on i"
        }
        assert placement.commands == []

    def test_until_the_pause_is_over_then_it_is_tried_once_more(self) -> None:
        placement = decide([demand("a")], [worker("w.1")], self.faulty(3, 9))

        assert placement.hopeless == {}
        assert loads(placement) == [("w.1", "a")]

    def test_one_more_try_may_have_to_wait_for_a_device(self) -> None:
        placement = decide([demand("a")], [worker("w.1", "b", load=1)], self.faulty(3, 9))

        assert placement.hopeless == {}

    def test_who_holds_it_serves_it(self) -> None:
        workers = [worker("v.1", "a", load=4), worker("w.2", device=1)]

        assert decide([demand("a", 9)], workers, self.faulty(3, 1)).hopeless == {}


class TestHopeless:
    def test_a_model_that_no_host_lists(self) -> None:
        """A host may only be about to come back, so I expect its requests to wait first."""
        assert decide([demand("x", wait_s=WAIT_S - 1)], [worker("w.1")]).hopeless == {}
        assert decide([demand("x", wait_s=WAIT_S)], [worker("w.1")]).hopeless == {
            "x": "no host may load it"
        }

    def test_a_model_that_is_too_large_for_every_host(self) -> None:
        hosts = host("h", 2, big={"ranks": 4}) | host("i", 3, big={"ranks": 4})

        assert decide([demand("big", wait_s=99)], [worker("w.1")], hosts).hopeless == {
            "big": "it takes 4 devices of one host, and the hosts that may load it have 3"
        }

    def test_pinned_models_keep_everything(self) -> None:
        hosts = host(devices=1, a={}, b={"pin": 1})
        starving = [demand("a", wait_s=99)]

        assert decide(starving, [worker("w.1", "b")], hosts).hopeless == {
            "a": "pinned models keep the devices of all hosts that may load it"
        }
        two = host(devices=2, a={}, b={"pin": 1})
        assert decide(starving, [worker("w.1", "b")], two).hopeless == {}

    def test_nothing_is_hopeless_while_no_host_is_there(self) -> None:
        assert decide([demand("x", wait_s=99)], [], {}).hopeless == {}

    def test_who_waits_for_a_device_is_not_without_hope(self) -> None:
        assert decide([demand("a", wait_s=99)], [worker("w.1", "b", swapped_s=1)]).hopeless == {}
