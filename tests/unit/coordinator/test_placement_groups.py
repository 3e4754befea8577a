"""Models that take several devices of a host."""

from __future__ import annotations

from coordinator.placement.devices import Worker
from tests.support.situations import decide, demand, host, loads, worker


class TestGroups:
    HOSTS = host(devices=4, big={"ranks": 2}, b={}, c={})

    def test_a_group_gets_devices_of_one_host_with_the_leaders_first(self) -> None:
        hosts = host("h", 1, big={"ranks": 2}) | host("i", 2, big={"ranks": 2})
        workers = [
            worker("u.1", controller="h"),
            worker("v.2", controller="i", device=1),
            worker("w.3", controller="i", device=0),
        ]

        placement = decide([demand("big")], workers, hosts)

        assert loads(placement) == [("w.3", "big")]
        assert placement.commands[0].devices == [0, 1]

    def test_a_group_gets_free_devices_first_then_the_longest_idle(self) -> None:
        workers = [
            worker("v.1", "b", idle_s=5, device=0),
            worker("w.2", device=1),
            worker("x.3", "c", idle_s=50, device=2),
        ]

        placement = decide([demand("big")], workers, self.HOSTS)

        assert placement.commands[0].devices == [1, 2]

    def test_a_group_gets_nothing_where_there_are_too_few_devices(self) -> None:
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

    def test_a_group_is_one_holder(self) -> None:
        assert loads(decide([demand("big", 2)], self.group(load=1), self.HOSTS)) == []

    def test_devices_of_a_group_are_not_free(self) -> None:
        assert loads(decide([demand("b")], self.group(load=1), self.HOSTS)) == []
        loading = self.group("loading")
        assert loads(decide([demand("b", wait_s=99)], loading, self.HOSTS)) == []

    def test_devices_of_a_group_are_not_free_before_a_follower_is_attached(self) -> None:
        leader, follower, _ = self.group("loading")
        shown_late = worker("w.2", device=1)
        assert follower.info.name == shown_late.info.name

        assert loads(decide([demand("b")], [leader, shown_late], self.HOSTS)) == []

    def test_the_rest_of_a_broken_group_is_not_a_free_device(self) -> None:
        _, follower, spare = self.group()

        assert loads(decide([demand("b", wait_s=99)], [follower, spare], self.HOSTS)) == []

    def test_a_group_gives_way_as_a_whole(self) -> None:
        placement = decide([demand("b"), demand("c")], self.group(), self.HOSTS)

        assert len(placement.commands) == 1
        assert placement.commands[0].worker == "v.1"
        assert placement.commands[0].devices == []

    def test_one_device_gives_way_rather_than_a_group(self) -> None:
        workers = [*self.group(), worker("x.4", "c", idle_s=1, device=2)]

        assert loads(decide([demand("b")], workers, self.HOSTS)) == [("x.4", "b")]

    def test_a_group_replaces_another_group_as_a_whole(self) -> None:
        hosts = host(devices=3, big={"ranks": 2}, other={"ranks": 2}, b={})
        workers = [*self.group(), worker("x.4", "b", idle_s=1_001, device=2)]

        placement = decide([demand("other")], workers, hosts)

        assert placement.commands[0].devices == [0, 1]

    def test_a_due_group_gathers_its_devices(self) -> None:
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

    def test_a_group_does_not_gather_broken_devices(self) -> None:
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

    def test_the_command_goes_to_a_leader_where_there_is_one(self) -> None:
        names = ["w", "v"]
        hosts = host(devices=2, big={"ranks": 2}, other={"ranks": 2})
        workers = [
            worker("v.1", "big", state="attached", group=names, device=0),
            worker("w.2", "big", group=names, device=1),
        ]

        placement = decide([demand("other")], workers, hosts)

        assert loads(placement) == [("w.2", "other")]
        assert placement.commands[0].devices == [1, 0]

    def test_devices_are_not_kept_for_a_group_that_cannot_get_all(self) -> None:
        hosts = host(devices=2, big={"ranks": 2}, b={"pin": 1}, d={})
        workers = [worker("v.1", "b"), worker("w.2", device=1)]

        placement = decide([demand("big", wait_s=50), demand("d", wait_s=40)], workers, hosts)

        assert loads(placement) == [("w.2", "d")]

    def test_a_group_leaves_a_pinned_model_its_last_worker(self) -> None:
        """Each of the two could go alone, but not both."""
        hosts = host(devices=2, big={"ranks": 2}, b={"pin": 1})
        workers = [
            worker("v.1", "b", idle_s=50, device=0),
            worker("w.2", "b", idle_s=50, device=1),
        ]

        assert loads(decide([demand("big", wait_s=99)], workers, hosts)) == []
