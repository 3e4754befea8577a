"""The scopes that hold the workers of another one."""

from __future__ import annotations

from tests.support.builders import make_worker_info
from tokenyard.admin.scopes import other_pauses
from tokenyard.admin.snapshot import WorkerView
from tokenyard.protocol.control import ALL, DesiredState, DesiredStates


def worker(name: str, model: str) -> WorkerView:
    info = make_worker_info(name, model=model)
    return WorkerView(f"{name}.1", "ready", lane=0, lease_ms=1, info=info)


def test_pauses_of_others_do_not_hold_a_worker() -> None:
    workers = [worker("w", "adder"), worker("v", "coder")]
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
