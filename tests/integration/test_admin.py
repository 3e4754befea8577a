"""The view of a yard: its leader, queues and workers, and what operators have told these."""

from __future__ import annotations

import msgspec

from tests.support.builders import make_request, worker_json
from tests.support.waiting import eventually
from tests.support.yard import LONG_MS
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import ALL, DesiredState, DesiredStates, Order, model_scope
from tokenyard.scripts import Scripts
from tokenyard.yard.snapshot import read_yard


def test_view_of_an_empty_yard_has_no_leader(scripts: Scripts) -> None:
    view = read_yard(scripts.yard)
    assert view.leader is None
    assert view.workers == []
    assert view.waiting == {"retry": 0, "high": 0, "normal": 0, "low": 0}
    assert view.models == {}
    assert view.desired_states == DesiredStates()


def test_view_has_leader_queues_and_dead_letters(scripts: Scripts) -> None:
    scripts.lead("north", LONG_MS)
    scripts.submit("high", [make_request(), make_request()])
    scripts.yard.connection.xadd(scripts.keys.dead, {"reason": "no id"})
    view = read_yard(scripts.yard)
    assert view.leader
    assert (view.leader.name, view.leader.epoch) == ("north", 1)
    assert 0 < view.leader.lease_ms <= LONG_MS
    assert (view.waiting["high"], view.waiting["normal"], view.dead) == (2, 0, 1)


def test_view_has_workers_with_lanes_and_leases(scripts: Scripts) -> None:
    worker = scripts.register("gpu", LONG_MS, worker_json("gpu"))
    scripts.yard.connection.xadd(scripts.keys.lane(worker), {"id": "q"})
    [seen] = read_yard(scripts.yard).workers
    assert (seen.worker, seen.state, seen.lane) == (worker, "ready", 1)
    assert 0 < seen.lease_ms <= LONG_MS
    assert read_yard(scripts.yard).models == {"adder": 1}


def test_view_tells_lost_left_and_unreadable_workers_apart(scripts: Scripts) -> None:
    draining = scripts.register("a", LONG_MS, worker_json("a", state="draining"))
    expired = scripts.register("b", 1, worker_json("b"))
    left = scripts.register("c", LONG_MS, worker_json("c"))
    scripts.yard.connection.zadd(scripts.keys.leases, {left: -1})
    odd = scripts.register("d", LONG_MS, b"{broken")

    def states() -> dict[str, str]:
        seen = {each.worker: each.state for each in read_yard(scripts.yard).workers}
        return seen if seen[expired] == "lost" else {}

    assert eventually(states) == {
        draining: "draining",
        expired: "lost",
        left: "left",
        odd: "unreadable",
    }
    assert read_yard(scripts.yard).ready_workers == 0


def test_desired_states_of_all_scopes(scripts: Scripts) -> None:
    # Given two scopes with a desired state, and one that nobody can read
    signals = Signals(scripts.yard)
    signals.give(Order(signal="PAUSE", mode="keep", by="kim@north", why="night"))
    last = signals.give(Order(signal="SET_GENERATION_EPOCH", scope=model_scope("a"), epoch=3))
    scripts.yard.connection.hset(scripts.keys.desired, "worker:w", b"{")
    view = read_yard(scripts.yard)

    # I expect the two, for Python and for scripts.
    since_ms = view.desired_states.by_scope[ALL].since_ms
    assert 0 < since_ms <= view.at_ms
    paused = DesiredState(
        run_state="PAUSED", mode="keep", by="kim@north", why="night", since_ms=since_ms
    )
    assert view.desired_states == DesiredStates(
        {ALL: paused, "model:a": DesiredState(epoch=3)}, last.ids[0]
    )
    assert msgspec.to_builtins(view)["desired_states"] == {
        "by_scope": {
            ALL: {
                "run_state": "PAUSED",
                "mode": "keep",
                "by": "kim@north",
                "why": "night",
                "since_ms": since_ms,
            },
            "model:a": {"epoch": 3},
        },
        "changed": last.ids[0],
    }


def test_run_state_of_each_worker(scripts: Scripts) -> None:
    # Given one that runs, one that is paused, one that was suspended, and one that is unreadable
    roster = {
        "a": worker_json("a"),
        "b": worker_json("b", run_state="PAUSED"),
        "c": worker_json("c", run_state="SUSPENDED", state="asleep"),
        "d": b"{",
    }
    for name, packed in roster.items():
        scripts.register(name, LONG_MS, packed)
    view = read_yard(scripts.yard)

    # I expect to see it, and who may be given requests now.
    assert [one.run_state for one in view.workers] == ["RUNNING", "PAUSED", "SUSPENDED", "RUNNING"]
    assert [one.is_ready for one in view.workers] == [True, True, False, False]
    assert [one.is_serving for one in view.workers] == [True, False, False, False]
    shown = msgspec.to_builtins(view)["workers"]
    assert [one["run_state"] for one in shown] == ["RUNNING", "PAUSED", "SUSPENDED", "RUNNING"]
