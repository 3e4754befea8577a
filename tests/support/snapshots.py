"""Views and snapshots of yards without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.builders import make_worker_info
from tokenyard.protocol.keys import INTAKE_CLASSES
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.yard.history import Snapshot
from tokenyard.yard.letters import WholeLetter
from tokenyard.yard.snapshot import LeaderView, WorkerView, YardView


def make_view_worker(
    worker: str, tally: WorkerTotals | None = None, *, lane: int = 0, **fields: Any
) -> WorkerView:
    """A worker with a lease; ready by default."""
    info = make_worker_info(worker.partition(".")[0], tally=tally or WorkerTotals(), **fields)
    return WorkerView(worker, info.state, lane, 20_000, info, info.run_state)


def make_view(workers: Sequence[WorkerView] = (), *, waiting: int = 0, **fields: Any) -> YardView:
    """A yard with a leader, whose waiting requests are of class ``low``."""
    values: dict[str, Any] = {
        "yard": "main",
        "leader": LeaderView("north", 1, 4000),
        "waiting": dict.fromkeys(INTAKE_CLASSES, 0) | {"low": waiting},
        "dead": 0,
        "workers": workers,
        "models": {},
        "handshake": {},
    }
    return YardView(**(values | fields))


def make_snapshot(
    at_ms: int = 0, workers: Sequence[WorkerView] = (), *, waiting: int = 0, **fields: Any
) -> Snapshot:
    """A snapshot of such a yard."""
    letters = fields.pop("letters", ())
    oldest = dict.fromkeys(INTAKE_CLASSES, 0) | {"low": 1000 * waiting}
    return Snapshot(make_view(workers, waiting=waiting, **fields), at_ms, oldest, letters)


def make_letter(letter: str, reason: str, **fields: Any) -> WholeLetter:
    """A dead letter of the request q7 of ann."""
    known = {"server_id": "low/1-0", "client": "ann", "id": "q7", "model": "", "fields": {}}
    return WholeLetter(letter=letter, died_ms=5000, reason=reason, **known | fields)
