"""Which pauses a request waits for, and how they are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.snapshots import make_view, make_view_worker
from tokenyard.protocol.control import ALL, DesiredState, DesiredStates, model_scope, worker_scope
from tokenyard.yard.pauses import Pause, all_pauses, other_pauses, pauses_of_model, pauses_of_worker
from tokenyard.yard.snapshot import RosterView, WorkerView, YardView

PAUSED = DesiredState(run_state="PAUSED", by="kim@north", why="its driver", since_ms=1_000)
ADDER = model_scope("adder")


def worker(name: str, model: str = "adder", **fields: Any) -> WorkerView:
    return make_view_worker(f"{name}.1", model=model, **fields)


def view(*workers: WorkerView, **scopes: DesiredState) -> YardView:
    return make_view(workers, desired_states=DesiredStates({**scopes}), at_ms=61_000)


def scopes(pauses: list[Pause]) -> list[str]:
    return [pause.scope for pause in pauses]


def test_a_pause_is_told_in_one_line() -> None:
    [pause] = all_pauses(DesiredStates({ADDER: PAUSED, "model:b": DesiredState(epoch=1)}))
    assert pause.text(61_000) == "model adder PAUSED for 1 m by kim@north: its driver"


def test_a_pause_of_an_older_version_says_what_is_known() -> None:
    [pause] = all_pauses(DesiredStates({ALL: DesiredState(run_state="SUSPENDED")}))
    assert pause.text(61_000) == "all workers SUSPENDED"


def test_a_pause_moves_no_cursor() -> None:
    odd = msgspec.structs.replace(PAUSED, why="\x1b[2Jgone\n", by="k\x07")
    [pause] = all_pauses(DesiredStates({"model:\x1bm": odd}))
    assert pause.text(61_000).isprintable()


@pytest.mark.parametrize("scope", [ALL, ADDER, worker_scope("w")])
def test_the_scope_that_holds_every_worker_of_the_model(scope: str) -> None:
    found = pauses_of_model(view(worker("w"), worker("x", "other"), **{scope: PAUSED}), "adder")
    assert scopes(found) == [scope]
    assert (found[0].by, found[0].why, found[0].since_ms) == ("kim@north", "its driver", 1_000)


def test_every_worker_by_its_own_name() -> None:
    desired_states = {worker_scope("a"): PAUSED, worker_scope("b"): PAUSED}
    found = pauses_of_model(view(worker("a"), worker("b"), **desired_states), "adder")
    assert scopes(found) == [worker_scope("a"), worker_scope("b")]


def test_no_pause_if_one_worker_runs() -> None:
    """Also one that is about to serve the model: then the request waits for that."""
    held = {worker_scope("a"): PAUSED}
    assert pauses_of_model(view(worker("a"), worker("b"), **held), "adder") == []
    assert pauses_of_model(view(worker("a"), worker("b", state="loading"), **held), "adder") == []


@pytest.mark.parametrize("state", ["failed", "attached"])
def test_pauses_ignore_workers_that_never_serve(state: str) -> None:
    yard = view(worker("a"), worker("b", state=state), **{worker_scope("a"): PAUSED})
    assert scopes(pauses_of_model(yard, "adder")) == [worker_scope("a")]


def test_a_model_that_nobody_holds_is_not_loaded_while_it_is_paused() -> None:
    warm = worker("w", "", state="warm")
    assert scopes(pauses_of_model(view(warm, **{ADDER: PAUSED}), "adder")) == [ADDER]
    assert pauses_of_model(view(warm, **{ADDER: PAUSED}), "other") == []
    assert scopes(pauses_of_model(view(**{ALL: PAUSED}), "adder")) == [ALL]


def test_an_adapter_waits_for_its_model() -> None:
    held = worker("w", adapters=["french"])
    assert scopes(pauses_of_model(view(held, **{ADDER: PAUSED}), "french")) == [ADDER]
    told = make_view(
        [worker("w", "", state="warm")],
        desired_states=DesiredStates({ADDER: PAUSED}),
        handshake={"adapters": '{"french": "adder"}'},
    )
    assert scopes(pauses_of_model(told, "french")) == [ADDER]


def test_a_request_without_a_model_waits_for_the_yards_only_one() -> None:
    yard = make_view(
        [worker("w")],
        desired_states=DesiredStates({ADDER: PAUSED}),
        handshake={"default_model": "adder"},
    )
    assert scopes(pauses_of_model(yard, "")) == [ADDER]


def test_pause_of_a_worker_that_has_not_obeyed_yet() -> None:
    [pause] = pauses_of_model(view(worker("w", run_state="PAUSED")), "adder")
    assert (pause.scope, pause.run_state) == (worker_scope("w"), "PAUSED")
    assert "has not obeyed" in pause.why


def test_pauses_of_one_worker() -> None:
    yard = view(worker("a"), worker("b"), **{worker_scope("a"): PAUSED})
    assert scopes(pauses_of_worker(yard, "a.1")) == [worker_scope("a")]
    assert pauses_of_worker(yard, "b.1") == []
    assert pauses_of_worker(yard, "gone.1") == []


# The scopes that hold the workers of another one.


def test_pauses_of_others_do_not_hold_a_worker() -> None:
    workers = [make_view_worker("w.1", model="adder"), make_view_worker("v.1", model="coder")]
    paused = DesiredState(run_state="PAUSED")
    all_held = ("worker:w", "worker:v", "model:adder", "model:coder")

    def others(scope: str, *held: str) -> list[str]:
        desired = DesiredStates(dict.fromkeys(held or all_held, paused))
        roster = RosterView(workers=workers, desired_states=desired)
        return scopes(other_pauses(roster, scope))

    assert others("worker:w") == ["model:adder"]
    assert others("model:coder") == ["worker:v"]
    assert others(ALL) == sorted(all_held)
    assert others("worker:w", ALL) == [ALL]
