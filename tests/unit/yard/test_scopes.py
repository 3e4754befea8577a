"""The scopes that hold the workers of another one."""

from __future__ import annotations

from tests.support.snapshots import make_view_worker
from tokenyard.protocol.control import ALL, DesiredState, DesiredStates
from tokenyard.yard.pauses import other_pauses


def test_pauses_of_others_do_not_hold_a_worker() -> None:
    workers = [make_view_worker("w.1", model="adder"), make_view_worker("v.1", model="coder")]
    paused = DesiredState(run_state="PAUSED")
    scopes = ("worker:w", "worker:v", "model:adder", "model:coder")
    desired = DesiredStates(dict.fromkeys(scopes, paused))

    def others(scope: str) -> list[str]:
        return [one.scope for one in other_pauses(workers, desired, scope)]

    assert others("worker:w") == ["model:adder"]
    assert others("model:coder") == ["worker:v"]
    assert others(ALL) == sorted(scopes)
    everybody = DesiredStates({ALL: paused})
    assert [one.scope for one in other_pauses(workers, everybody, "worker:w")] == [ALL]
