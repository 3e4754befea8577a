"""Which worker should hold which model: the rules of the placement, one by one."""

from __future__ import annotations

import pytest

from tests.support.situations import WAIT_S, decide, demand, host, loads, worker


class TestColdModel:
    def test_the_first_request_makes_a_warm_worker_load_at_once(self) -> None:
        placement = decide([demand("a")], [worker("w.1")])

        assert loads(placement) == [("w.1", "a")]
        assert placement.commands[0].why == (
            "no worker holds it and 1 request waited up to 0.0 s; a device is free"
        )

    def test_a_model_without_requests_is_not_loaded(self) -> None:
        assert loads(decide([], [worker("w.1")])) == []
        assert loads(decide([demand("a", 0)], [worker("w.1")])) == []

    @pytest.mark.parametrize("state", ["loading", "ready"])
    def test_one_worker_that_serves_or_loads_a_model_is_enough(self, state: str) -> None:
        workers = [worker("v.1", "a", state=state, load=4), worker("w.2", device=1)]

        assert loads(decide([demand("a", 2)], workers)) == []

    @pytest.mark.parametrize("state", ["warming", "failed", "draining", "unloading", "attached"])
    def test_a_worker_in_another_state_gets_no_command(self, state: str) -> None:
        assert loads(decide([demand("a", wait_s=99)], [worker("w.1", state=state)])) == []

    def test_spares_of_an_occupied_device_get_no_command(self) -> None:
        workers = [worker("v.1", "b", load=1), worker("w.2")]

        assert loads(decide([demand("a")], workers)) == []

    def test_of_two_models_the_one_that_waits_longest_comes_first(self) -> None:
        demands = [demand("a", 9, wait_s=1), demand("b", 1, wait_s=2)]

        assert loads(decide(demands, [worker("w.1")])) == [("w.1", "b")]

    def test_a_worker_that_names_no_controller_is_left_alone_and_counts(self) -> None:
        """Given workers of a program without placement, I expect them to be left alone."""
        workers = [worker("v.1", "a", controller=""), worker("u.2", "b", controller="")]
        workers.append(worker("w.3"))

        assert loads(decide([demand("a")], workers)) == []
        assert loads(decide([demand("c", wait_s=99)], workers)) == [("w.3", "c")]


class TestWhichDevice:
    def test_the_cheapest_device_is_chosen(self) -> None:
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

    def test_among_equal_devices_the_longest_idle_is_chosen(self) -> None:
        workers = [
            worker("v.1", "b", idle_s=10, device=0),
            worker("w.2", "b", idle_s=30, device=1),
            worker("x.3", "c", idle_s=20, device=2),
        ]

        placement = decide([demand("a")], workers)

        assert loads(placement) == [("w.2", "a")]
        assert placement.commands[0].why.endswith("; b has had no work for 30 s")

    def test_a_worker_without_any_work_counts_as_used_when_it_was_ready(self) -> None:
        workers = [
            worker("v.1", "b", idle_s=900, since_s=10, device=0),
            worker("w.2", "b", idle_s=900, since_s=20, device=1),
        ]

        assert loads(decide([demand("a")], workers)) == [("w.2", "a")]

    @pytest.mark.parametrize(("idle_s", "expected"), [(0.9, []), (1.1, [("w.1", "a")])])
    def test_a_moment_without_work_is_too_short_to_give_way(
        self, idle_s: float, expected: list[tuple[str, str]]
    ) -> None:
        """Given a model that takes 2 s to load, with requests until a moment ago."""
        workers = [worker("w.1", "b", idle_s=idle_s)]

        assert loads(decide([demand("a")], workers, host(a={}, b={"load_s": 2.0}))) == expected

    def test_an_idle_worker_with_waiting_requests_keeps_its_model(self) -> None:
        demands = [demand("a", wait_s=2), demand("b", wait_s=1)]

        assert loads(decide(demands, [worker("w.1", "b")])) == []

    def test_an_idle_device_that_has_just_changed_its_model_keeps_it(self) -> None:
        for swapped_s, expected in ((WAIT_S - 1, []), (WAIT_S + 1, [("w.1", "a")])):
            workers = [worker("w.1", "b", swapped_s=swapped_s)]
            assert loads(decide([demand("a")], workers)) == expected

    @pytest.mark.parametrize("spare", ["u.2", "w.2"])
    def test_a_recent_swap_counts_also_where_only_a_spare_reports_it(self, spare: str) -> None:
        workers = [worker("v.1", "b"), worker(spare, swapped_s=1)]

        assert loads(decide([demand("a")], workers)) == []

    @pytest.mark.parametrize("other", ["u.2", "w.2"])
    def test_a_device_between_two_workers_is_not_given_away(self, other: str) -> None:
        workers = [worker("v.1", "b"), worker(other, "c", state="draining", load=1)]

        assert loads(decide([demand("a", wait_s=99)], workers)) == []

    def test_the_wait_of_the_new_model_counts(self) -> None:
        hosts = host(a={"max_model_wait_s": 5.0}, b={"max_model_wait_s": 500.0})

        placement = decide([demand("a")], [worker("w.1", "b", swapped_s=6)], hosts)

        assert loads(placement) == [("w.1", "a")]


class TestStarvation:
    def test_a_busy_device_changes_its_model_once_another_has_waited_long_enough(self) -> None:
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

    def test_of_models_with_as_many_workers_the_one_with_fewest_requests_gives_one(self) -> None:
        workers = [worker("v.1", "b", load=4), worker("w.2", "c", load=3, device=1)]

        assert loads(decide([demand("a", wait_s=99)], workers)) == [("w.2", "a")]
        demands = [demand("a", wait_s=99), demand("c", 2)]
        assert loads(decide(demands, workers)) == [("v.1", "a")]

    def test_a_device_changes_its_model_once_in_a_turn(self) -> None:
        workers = [worker("w.1", "b", load=3, swapped_s=WAIT_S - 1)]

        assert loads(decide([demand("a", wait_s=500)], workers)) == []

    def test_a_model_serves_for_at_least_as_long_as_its_load_took(self) -> None:
        """Given a load that takes longer than models wait, I expect some work between two."""
        hosts = host(a={}, b={"load_s": 100.0})
        for since_s, expected in ((99, []), (101, [("w.1", "a")])):
            workers = [worker("w.1", "b", load=3, swapped_s=200, since_s=since_s)]
            assert loads(decide([demand("a", wait_s=99)], workers, hosts)) == expected

    @pytest.mark.parametrize(("since_s", "expected"), [(6.9, []), (7.1, [("w.1", "a")])])
    def test_a_model_serves_for_at_least_as_long_as_its_first_load_took(
        self, since_s: float, expected: list[tuple[str, str]]
    ) -> None:
        """Given a host that has not reported yet how long the load took."""
        workers = [worker("w.1", "b", load=1, since_s=since_s, phases_s={"weights": 7.0})]

        assert loads(decide([demand("a", wait_s=99)], workers, host(a={}, b={}))) == expected

    def test_a_model_with_a_worker_takes_no_busy_device(self) -> None:
        """Given a model whose own worker is full, I expect it to wait for that one."""
        workers = [worker("v.1", "a", load=4), worker("w.2", "b", load=1, device=1)]

        assert loads(decide([demand("a", 4, wait_s=500)], workers)) == []

    def test_a_wait_set_for_the_model_counts(self) -> None:
        hosts = host(a={"max_model_wait_s": 5.0}, b={})

        assert loads(decide([demand("a", wait_s=6)], [worker("w.1", "b", load=1)], hosts))


class TestMoreWorkers:
    def test_a_queue_longer_than_the_lanes_gets_one_more_worker(self) -> None:
        workers = [worker("v.1", "a", load=4), worker("w.2", device=1), worker("x.3", device=2)]

        assert loads(decide([demand("a", 4)], workers)) == []
        placement = decide([demand("a", 5)], workers)

        assert loads(placement) in ([("w.2", "a")], [("x.3", "a")])
        assert placement.commands[0].why == "5 requests wait for 1 worker; a device is free"

    def test_a_loading_worker_counts(self) -> None:
        workers = [
            worker("v.1", "a", load=4),
            worker("w.2", "a", state="loading", device=1, lane_limit=2),
            worker("x.3", device=2),
        ]

        assert loads(decide([demand("a", 8)], workers)) == []
        assert loads(decide([demand("a", 9)], workers)) == [("x.3", "a")]

    def test_a_model_does_not_grow_before_its_first_worker_is_ready(self) -> None:
        workers = [worker("v.1", "a", state="loading", lane_limit=1), worker("w.2", device=1)]

        assert loads(decide([demand("a", 500)], workers)) == []

    def test_a_growing_model_takes_the_idle_worker_of_another(self) -> None:
        workers = [worker("v.1", "a", load=4), worker("w.2", "b", device=1)]

        assert loads(decide([demand("a", 5)], workers)) == [("w.2", "a")]

    def test_a_growing_model_waits_as_long_as_a_load_before_it_takes_another_worker(self) -> None:
        """Given a queue that may be gone before another worker is up, I expect it to wait."""
        hosts = host(a={"load_s": 7.0}, b={})
        idle = [worker("v.1", "a", load=4), worker("w.2", "b", device=1)]
        free = [worker("v.1", "a", load=4), worker("w.2", device=1)]

        assert loads(decide([demand("a", 5, wait_s=6)], idle, hosts)) == []
        assert loads(decide([demand("a", 5, wait_s=8)], idle, hosts)) == [("w.2", "a")]
        assert loads(decide([demand("a", 5, wait_s=0)], free, hosts)) == [("w.2", "a")]

    def test_no_model_with_requests_gives_way_to_a_growing_one(self) -> None:
        busy = [worker("v.1", "a", load=4), worker("w.2", "b", load=1, device=1)]
        waited_for = [worker("v.1", "a", load=4), worker("w.2", "b", device=1)]

        assert loads(decide([demand("a", 500, wait_s=500)], busy)) == []
        demands = [demand("a", 500, wait_s=500), demand("b", 1)]
        assert loads(decide(demands, waited_for)) == []

    def test_a_cold_model_comes_before_a_growing_one(self) -> None:
        workers = [worker("v.1", "a", load=4), worker("w.2", device=1)]
        demands = [demand("a", 500, wait_s=50), demand("b", 1)]

        assert loads(decide(demands, workers)) == [("w.2", "b")]


class TestPins:
    def test_a_pinned_model_is_loaded_without_requests(self) -> None:
        hosts = host(a={"pin": 2}, b={})
        workers = [worker("v.1"), worker("w.2", device=1), worker("x.3", device=2)]

        (first,) = loads(decide([], workers, hosts))
        assert first[1] == "a"

        workers = [worker("v.1", "a"), worker("w.2", "a", device=1), worker("x.3", device=2)]
        assert loads(decide([], workers, hosts)) == []

    def test_a_pinned_model_comes_before_models_with_requests(self) -> None:
        hosts = host(a={"pin": 1}, b={})

        assert loads(decide([demand("b", wait_s=9)], [worker("w.1")], hosts)) == [("w.1", "a")]

    def test_one_decision_gives_a_pinned_model_one_worker(self) -> None:
        workers = [worker("v.1"), worker("w.2", device=1)]

        placement = decide([demand("a", wait_s=99)], workers, host(a={"pin": 2}))

        assert len(placement.commands) == 1

    def test_a_pinned_model_waits_for_a_busy_device(self) -> None:
        hosts = host(a={"pin": 1}, b={})
        busy = [worker("w.1", "b", load=1)]

        assert loads(decide([], busy, hosts)) == []
        assert loads(decide([demand("a", wait_s=31)], busy, hosts)) == [("w.1", "a")]

    def test_the_last_workers_of_a_pinned_model_keep_it(self) -> None:
        hosts = host(a={"pin": 1}, b={})
        starving = [demand("b", wait_s=99)]
        two = [worker("v.1", "a"), worker("w.2", "a", load=1, device=1)]

        assert loads(decide(starving, two[:1], hosts)) == []
        assert loads(decide(starving, two, hosts)) == [("v.1", "b")]
