"""Sends the last few requests of a job again to idle workers; the first result counts.

Otherwise one slow worker at the end delays the whole job. A copy has its own id, so both run; the
slower one is cancelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, cast

from tokenyard import clock
from tokenyard.admin.snapshot import WorkerView, read_yard
from tokenyard.batch.requests import LineRequest
from tokenyard.broker.connection import connected
from tokenyard.client.options import FullPrompt, SharedOptions
from tokenyard.client.sync import Client, Handle
from tokenyard.protocol.errors import TokenyardError, UnknownRequest, WaitTimeout
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Result

#: Requests are hedged when at most this many are left.
MOST_HEDGED: Final = 32
#: Time until a request is sent again; it doubles for the next copy.
AFTER_S: Final = 2.0
MOST_COPIES: Final = 2


@dataclass(slots=True)
class _Hedged:
    request: LineRequest
    since: float
    copies: list[Handle] = field(default_factory=list)

    @property
    def is_due(self) -> bool:
        """Whether it has waited long enough for its next copy."""
        waited_s = clock.monotonic() - self.since
        return len(self.copies) < MOST_COPIES and waited_s >= AFTER_S * 2 ** len(self.copies)


class Hedges:
    """The copies of one job; used by one thread."""

    def __init__(self, client: Client, url: str, yard: str, shared: SharedOptions) -> None:
        self._client = client
        self._url = url
        self._keys = Keys(yard)
        self._shared = shared
        self._hedged: dict[int, _Hedged] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel the copies that are left."""
        with contextlib.suppress(TokenyardError):
            self._keep([])

    def look(self, waiting: Sequence[LineRequest]) -> Iterator[tuple[LineRequest, Result]]:
        """Send copies that are due; yield the successful results of copies.

        Raises `BrokerUnavailable`.
        """
        self._keep({request.number for request in waiting})
        if not 0 < len(waiting) <= MOST_HEDGED:
            return
        for request in waiting:
            self._hedged.setdefault(request.number, _Hedged(request, clock.monotonic()))
        for hedged in list(self._hedged.values()):
            result = _result(hedged.copies)
            if result is not None:
                yield hedged.request, result
        due = [hedged for hedged in self._hedged.values() if hedged.is_due]
        if due:
            self._send(due)

    def _keep(self, numbers: Collection[int]) -> None:
        """Cancel the copies of all other lines, which have an answer."""
        for number in [number for number in self._hedged if number not in numbers]:
            for copy in self._hedged.pop(number).copies:
                copy.cancel()

    def _send(self, due: Sequence[_Hedged]) -> None:
        idle = self._idle_workers()
        for hedged in due:
            own = dict(cast(Mapping[str, Any], hedged.request.item))
            worker = next((one for one in idle if _serves(one, own.get("model", ""))), None)
            if worker is None:
                continue
            idle.remove(worker)
            own["id"] = f"{hedged.request.request_id}~{len(hedged.copies) + 1}"
            hedged.copies += self._client.submit_many([cast(FullPrompt, own)], **self._shared)

    def _idle_workers(self) -> list[WorkerView]:
        with connected(self._url) as connection:
            view = read_yard(connection, self._keys)
        return [worker for worker in view.workers if worker.is_serving and not worker.lane]


def _serves(worker: WorkerView, model: str) -> bool:
    info = worker.info
    return info is not None and (not model or model == info.model or model in info.adapters)


def _result(copies: Sequence[Handle]) -> Result | None:
    """The first successful result, if there is one."""
    for copy in copies:
        with contextlib.suppress(WaitTimeout, UnknownRequest):
            result = copy.wait(0.0)
            if result.ok:
                return result
    return None
