"""The coordinator's view of workers and hosts."""

from __future__ import annotations

import pytest
import redis

import coordinator.roster
from coordinator.roster import LIST_KEPT_S, Roster
from tests.support.builders import worker_json
from tests.support.fake_clock import FakeClock
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.protocol.control import ALL, DesiredState, Order, RunState, model_scope, worker_scope
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.worker_info import WORKER_STATES, HostInfo, ModelInfo, encode_host
from tokenyard.scripts import Scripts

ADDER = ModelInfo(name="adder", adapters=["roman"], pin=1)
OTHER = ModelInfo(name="other")


@pytest.fixture
def roster(connection: redis.Redis, keys: Keys) -> Roster:
    return Roster(Yard(connection, keys))


class RosterYard(PlayedYard):
    """Workers and hosts of a yard."""

    def host(self, name: str, *models: ModelInfo, left_ms: int = 0) -> None:
        info = encode_host(HostInfo(name=name, models=list(models), left_ms=left_ms))
        self.connection.hset(self.keys.hosts, name, info)

    def tell(self, scope: str, run_state: RunState) -> None:
        """Set the desired state of a scope."""
        seen = self.connection.hget(self.keys.desired, scope) or b""
        order = Order(signal="PAUSE", scope=scope)
        assert self.scripts.signal(order, seen, DesiredState(run_state=run_state))

    def hosts(self) -> set[bytes]:
        return set(self.connection.hkeys(self.keys.hosts))


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, scripts: Scripts) -> RosterYard:
    return RosterYard(connection, keys, scripts)


def given(roster: Roster) -> list[str]:
    """Names of the workers with a lane."""
    return sorted(lane.name for lanes in roster.lanes.values() for lane in lanes)


def read_again(roster: Roster) -> None:
    roster.mark_stale()
    assert roster.refresh()


@pytest.mark.parametrize("state", WORKER_STATES)
def test_only_a_ready_worker_with_a_model_is_given_requests(
    yard: RosterYard, roster: Roster, state: str
) -> None:
    worker = yard.worker("a", state=state, model="adder")
    yard.worker("b", state=state, model="")

    roster.refresh()

    found = [lane.worker for lanes in roster.lanes.values() for lane in lanes]
    assert found == ([worker] if state == "ready" else [])


class TestDesiredStates:
    @pytest.mark.parametrize("run_state", ["PAUSED", "SUSPENDED"])
    @pytest.mark.parametrize(
        ("scope", "left"),
        [(ALL, []), (model_scope("adder"), ["c"]), (worker_scope("a"), ["b", "c"])],
    )
    def test_paused_workers_have_no_lanes(
        self, yard: RosterYard, roster: Roster, scope: str, left: list[str], run_state: RunState
    ) -> None:
        yard.worker("a", model="adder")
        yard.worker("b", model="adder")
        yard.worker("c", model="subtractor")
        yard.tell(scope, run_state)

        roster.refresh()
        assert given(roster) == left

        # If they are resumed, I expect lanes for all of them.
        yard.tell(scope, "RUNNING")
        read_again(roster)
        assert given(roster) == ["a", "b", "c"]

    def test_a_worker_that_is_not_running_again_yet_has_no_lane(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        """Given a desired state RUNNING, and a worker that has yet to obey it."""
        worker = yard.worker("a", run_state="PAUSED")
        roster.refresh()
        assert not roster.lanes

        yard.scripts.renew(LONG_MS, [(worker, worker_json("a"))])
        read_again(roster)
        assert given(roster) == ["a"]

    def test_the_next_incarnation_is_paused_too(self, yard: RosterYard, roster: Roster) -> None:
        yard.tell(worker_scope("a"), "PAUSED")
        yard.worker("a")
        yard.worker("a")

        roster.refresh()

        assert [member.run_state for member in roster.members.values()] == ["PAUSED", "PAUSED"]

    def test_models_of_paused_workers_are_served(self, yard: RosterYard, roster: Roster) -> None:
        """So that requests for them wait."""
        yard.worker("a", model="adder")
        yard.worker("b", model="subtractor", state="asleep", run_state="SUSPENDED")
        yard.tell(ALL, "PAUSED")

        roster.refresh()

        assert roster.servable == {"adder", "subtractor"}

    def test_unreadable_desired_states_pause_no_worker(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        yard.worker("a")
        yard.connection.hset(yard.keys.desired, mapping={ALL: "{", b"\xff": "?"})

        roster.refresh()

        assert given(roster) == ["a"]


class TestHosts:
    def test_a_host_counts_while_a_living_worker_names_it(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        # Given a host with a worker, one whose worker has gone, and one without any
        yard.worker("a", state="warm", model="", controller="lives")
        gone = yard.worker("b", state="warm", model="", controller="gone")
        for name in ("lives", "gone", "unnamed"):
            yard.host(name, ModelInfo(name=f"model of {name}"))
        yard.scripts.retire(gone, "left")

        roster.refresh()
        assert set(roster.hosts) == {"lives"}
        assert roster.servable == {"model of lives"}

        # If its worker goes, too, I expect only what it listed to be known.
        (worker,) = roster.members
        yard.scripts.retire(worker, "left")
        read_again(roster)
        assert (roster.hosts, roster.servable) == ({}, set())
        assert set(roster.bases()) == {f"model of {name}" for name in ("lives", "gone", "unnamed")}

    def test_a_host_whose_workers_are_lost_does_not_count(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        worker = yard.worker(controller="c")
        yard.host("c", ModelInfo(name="subtractor"))
        yard.connection.xadd(yard.keys.lane(worker), {"id": "r"})  # so it stays in the roster
        yard.scripts.retire(worker, "lost")

        roster.refresh()

        assert roster.lost == [worker]
        assert (roster.hosts, roster.servable) == ({}, set())

    def test_unreadable_host_entries_are_ignored(self, yard: RosterYard, roster: Roster) -> None:
        yard.worker(controller="c")
        yard.host("c", ModelInfo(name="adder"))
        yard.connection.hset(yard.keys.hosts, "rubbish", "{")
        yard.connection.hset(yard.keys.hosts, b"\xff", "{}")

        roster.refresh()

        assert set(roster.hosts) == {"c"}

    def test_host_entries_without_workers_are_deleted_in_the_end(
        self, yard: RosterYard, roster: Roster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a host with a worker, and one without
        yard.worker(controller="stays")
        yard.host("stays")
        yard.host("gone")
        yard.connection.hset(yard.keys.hosts, b"\xff", "{}")
        roster.refresh()

        # I expect nothing to be deleted at first,
        roster.forget_hosts()
        assert yard.hosts() == {b"stays", b"gone", b"\xff"}

        # and later the entry that had no worker all the time.
        yard.host("new")
        monkeypatch.setattr(coordinator.roster, "HOST_GONE_S", -1.0)
        roster.forget_hosts()
        assert yard.hosts() == {b"stays", b"new"}

    def test_a_yard_without_workers_knows_its_models(
        self, yard: RosterYard, roster: Roster, fake_clock: FakeClock
    ) -> None:
        # Given hosts that have stopped, two of which could load the same
        yard.host("first", ADDER, left_ms=1)
        yard.host("last", ADDER, left_ms=2)
        yard.host("other", OTHER)
        roster.refresh()

        fake_clock.advance(2 * LIST_KEPT_S)
        read_again(roster)
        roster.forget_hosts()

        assert yard.hosts() == {b"last", b"other"}
        assert roster.bases() == {"adder": "adder", "roman": "adder", "other": "other"}
        assert roster.hosts == {}

    @pytest.mark.parametrize("seen_s", [120.0, LIST_KEPT_S], ids=["stopped earlier", "died"])
    def test_a_model_is_known_for_long_after_its_hosts_where_others_are(
        self, yard: RosterYard, roster: Roster, fake_clock: FakeClock, seen_s: float
    ) -> None:
        # Given a host that is gone, and one that is there with another list
        ago_s = LIST_KEPT_S - seen_s
        left_ms = int((yard.connection.time()[0] - ago_s) * 1000) if ago_s else 0
        yard.host("gone", ADDER, OTHER, left_ms=left_ms)
        yard.worker(controller="there", model="other")
        yard.host("there", OTHER)
        roster.refresh()

        fake_clock.advance(seen_s - 2)
        roster.forget_hosts()

        # I expect the model that only it could load to be known, but not to count as there,
        assert yard.hosts() == {b"gone", b"there"}
        assert [one.name for host in roster.gone for one in host.models] == ["adder"]
        assert roster.bases() == {"adder": "adder", "roman": "adder", "other": "other"}
        assert roster.servable == {"other"}

        # and to be forgotten in the end.
        fake_clock.advance(3)
        roster.forget_hosts()
        assert yard.hosts() == {b"there"}

    def test_a_host_that_announces_another_list_replaces_its_own(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        yard.host("c", ADDER, left_ms=1)
        yard.worker(controller="c", model="other")
        yard.host("c", OTHER)
        roster.refresh()

        assert (roster.gone, roster.bases()) == ([], {"other": "other"})

    def test_a_host_that_is_named_again_is_kept(
        self, yard: RosterYard, roster: Roster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        yard.host("c")
        roster.refresh()
        yard.worker(controller="c")
        read_again(roster)

        monkeypatch.setattr(coordinator.roster, "HOST_GONE_S", -1.0)
        roster.forget_hosts()

        assert yard.hosts() == {b"c"}


class TestModels:
    def test_models_are_those_that_workers_hold_and_hosts_may_load(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        yard.worker("a", model="adder", adapters=["roman"], controller="c")
        yard.worker("b", state="warm", model="", controller="c")
        yard.host("c", ModelInfo(name="subtractor", adapters=["greek"]), ModelInfo(name="adder"))

        roster.refresh()

        assert roster.servable == {"adder", "subtractor"}
        assert roster.bases() == {
            "adder": "adder",
            "subtractor": "subtractor",
            "roman": "adder",
            "greek": "subtractor",
        }

    def test_the_name_of_a_model_is_never_an_adapters(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        yard.worker("a", model="adder", adapters=["subtractor"], controller="c")
        yard.host("c", ModelInfo(name="subtractor", adapters=["adder"]))

        roster.refresh()

        assert roster.bases() == {"adder": "adder", "subtractor": "subtractor"}

    def test_an_adapter_of_two_models_stays_with_one(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        yard.worker("a", model="b", adapters=["roman"])
        yard.worker("b", model="a", adapters=["roman"])

        for _ in range(2):
            read_again(roster)
            assert roster.bases()["roman"] == "b"


class TestJoined:
    def test_a_warm_worker_has_joined_where_it_may_get_several_models(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        for name, state in (("a", "warm"), ("b", "asleep"), ("c", "warming"), ("d", "attached")):
            yard.worker(name, state=state, model="", controller="c")
        yard.worker("e")
        yard.host("c", ModelInfo(name="adder"), ModelInfo(name="subtractor"))

        roster.refresh()

        assert roster.joined() == {"a", "b", "d", "e"}

    def test_a_warm_worker_has_not_joined_where_it_is_about_to_get_its_model(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        yard.worker("a", state="warm", model="", controller="c")
        yard.worker("b", state="attached", model="", controller="c")
        yard.host("c", ModelInfo(name="adder"))

        roster.refresh()

        assert roster.joined() == {"b"}

    @pytest.mark.parametrize("state", ["ready", "warm", "asleep", "attached"])
    def test_a_paused_worker_has_joined(self, yard: RosterYard, roster: Roster, state: str) -> None:
        yard.worker("a", state=state)
        yard.worker("b", state="warming", model="")
        yard.tell(ALL, "SUSPENDED")

        roster.refresh()

        assert roster.joined() == {"a"}

    def test_the_deterministic_order_includes_paused_workers(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        yard.worker("c")
        yard.worker("b", state="asleep", run_state="SUSPENDED")
        yard.worker("a", run_state="PAUSED")
        yard.worker("d", state="asleep")

        roster.refresh()

        assert [lane.name for lane in roster.worker_order()] == ["a", "b", "c"]
        assert given(roster) == ["c"]


class TestRoom:
    def test_lanes_follow_added_and_freed_loads(self, yard: RosterYard, roster: Roster) -> None:
        """Between two readings, so that one request does not need a read of all lanes."""
        a = yard.worker("a", model="adder", lane_limit=2)
        b = yard.worker("b", model="adder", lane_limit=2)
        roster.refresh()
        lanes = roster.lanes["adder"]

        roster.add_load(a, work=10)
        roster.add_load(a, work=10)
        roster.add_load(b, has_trials=True)

        assert [(lane.load, lane.work) for lane in lanes] == [(2, 20), (1, 0)]
        assert lanes.room == 0
        assert lanes.next_open("") is None

        roster.free(a, 1, "9999999999999-0", work=10)
        assert (lanes[0].load, lanes[0].work) == (1, 10)
        assert lanes.next_open("") == lanes[0]

    def test_lanes_of_a_paused_worker_follow_when_it_runs_again(
        self, yard: RosterYard, roster: Roster
    ) -> None:
        worker = yard.worker("a", model="adder", lane_limit=2)
        yard.tell(worker_scope("a"), "PAUSED")
        roster.refresh()

        roster.add_load(worker)
        roster.free(worker, 1, "9999999999999-0")

        assert not roster.lanes
        yard.tell(worker_scope("a"), "RUNNING")
        read_again(roster)
        assert roster.lanes["adder"].room == 2

    def test_the_time_of_last_work_is_remembered(self, yard: RosterYard, roster: Roster) -> None:
        """Given a worker with an entry on its lane, and one whose only entry has come and gone."""
        busy, quick, idle = (yard.worker(name, model="adder") for name in "abc")
        yard.connection.xadd(yard.keys.lane(busy), {"id": "q"})
        roster.refresh()
        roster.add_load(quick)
        roster.free(quick, 1, "9999999999999-0")
        yard.connection.delete(yard.keys.lane(busy))

        read_again(roster)

        assert roster.members[busy].worked_ms > 0
        assert roster.members[quick].worked_ms > 0
        assert roster.members[idle].worked_ms == 0
