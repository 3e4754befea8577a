"""The devices of a yard, derived from its workers; and how fast they work."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.snapshots import make_view_worker
from tokenyard.yard.devices import DeviceView, device_views, seen_from, state_change
from tokenyard.yard.snapshot import SeenState, WorkerView


def on(index: int, worker: str, state: str = "ready", **fields: Any) -> WorkerView:
    """A worker on a device of ``gpu-1``."""
    values = {"controller": "gpu-1", "device": index, "state": state, **fields}
    return make_view_worker(worker, **values)


def shown(views: list[DeviceView]) -> list[tuple[list[int], str, list[str]]]:
    return [
        (list(one.indexes), one.worker.worker, [other.worker for other in one.others])
        for one in views
    ]


def test_a_device_is_shown_with_the_worker_that_occupies_it() -> None:
    views = device_views(
        [on(1, "b.1", "warm"), on(0, "a.1", "asleep"), on(0, "a.2", "loading"), on(1, "b.2")]
    )
    assert shown(views) == [([0], "a.2", ["a.1"]), ([1], "b.2", ["b.1"])]


def test_workers_that_are_gone_are_shown_only_where_nothing_else_is() -> None:
    gone: list[SeenState] = ["left", "lost"]
    old = [WorkerView(f"a.{n}", state, 0, 0, on(0, "a").info) for n, state in enumerate(gone)]
    assert shown(device_views([*old, on(0, "a.7")])) == [([0], "a.7", [])]
    assert shown(device_views(old)) == [([0], "a.1", [])]


def test_a_group_is_one_device_in_the_order_of_its_ranks() -> None:
    names = ["b", "a", "c"]
    views = device_views(
        [
            on(0, "a.1", "attached", group=names),
            on(1, "b.1", group=names),
            on(2, "c.1", "attached", group=names),
            on(0, "a-spare.1", "asleep"),
            on(3, "d.1"),
        ]
    )
    assert shown(views) == [([1, 0, 2], "b.1", ["a.1", "a-spare.1", "c.1"]), ([3], "d.1", [])]
    assert views[0].members == names


def test_a_follower_without_its_leader_is_a_device_of_its_own() -> None:
    assert shown(device_views([on(0, "a.1", "attached", group=["b", "a"])])) == [([0], "a.1", [])]


def test_names_of_groups_belong_to_one_host() -> None:
    names = ["a", "b"]
    here = [on(0, "a.1", group=names), on(1, "b.1", "attached", group=names)]
    there = [
        on(n, f"{name}.2", "attached", group=names, controller="gpu-2")
        for n, name in enumerate(names)
    ]
    assert len(device_views([*here, *there])) == 3


def test_workers_without_a_host_have_a_device_each() -> None:
    unreadable = WorkerView("x.3", "unreadable", 0, 5)
    views = device_views([make_view_worker("a.1"), make_view_worker("b.2"), unreadable])
    assert [one.name for one in views] == ["a", "b", "x"]


def test_a_worker_is_seen_in_the_place_of_the_one_that_occupies_its_device() -> None:
    workers = [on(0, "a.2"), on(0, "a.1", "asleep"), on(0, "a.3", "warm")]
    views = device_views(workers)
    assert shown([seen_from(views, workers[1])]) == [([0], "a.1", ["a.2", "a.3"])]
    assert seen_from(views, workers[0]) is views[0]
    assert shown([seen_from([], workers[1])]) == [([0], "a.1", [])]


@pytest.mark.parametrize(
    ("state", "fields", "doing", "usual_s"),
    [
        ("loading", {}, "loads", 8.0),
        ("loading", {"engine_version": "1"}, "wakes", 0.0),
        ("loading", {"model": "coder"}, "loads", 0.0),
        ("warming", {}, "warms up", 0.0),
        ("unloading", {}, "releases its device", 0.0),
    ],
)
def test_changes_are_measured_by_the_last_load(
    state: str, fields: dict[str, Any], doing: str, usual_s: float
) -> None:
    [view] = device_views([on(0, "a.1", state, since_ms=1_000, **fields)])
    change = state_change(view, {("gpu-1", "adder"): 8.0}, now_ms=4_000)
    assert change
    assert (change.doing, change.for_ms, change.usual_s) == (doing, 3_000, usual_s)


@pytest.mark.parametrize("state", ["ready", "asleep", "warm", "failed", "attached"])
def test_states_that_last_are_no_changes(state: str) -> None:
    [view] = device_views([on(0, "a.1", state)])
    assert state_change(view, {}, now_ms=4_000) is None
