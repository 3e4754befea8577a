"""Submits requests; those of one moment share a call."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from gateway.queue.calls import call
from tokenyard import scripts
from tokenyard.broker.connection import AsyncRedis
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.keys import Keys, PriorityClass
from tokenyard.protocol.wire import Request
from tokenyard.scripts import Acceptance


@dataclass(slots=True)
class _Waiting:
    request: Request
    priority_class: PriorityClass
    refuse_late: bool
    accepted: asyncio.Future[Acceptance]


class BurstSubmitter:
    """Sends requests in bursts: while one call is under way, the next burst gathers."""

    def __init__(self, connection: AsyncRedis, url: str, keys: Keys) -> None:
        self._connection = connection
        self._url = url
        self._keys = keys
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    async def submit(
        self, request: Request, priority_class: PriorityClass, *, refuse_late: bool
    ) -> Acceptance:
        """Submit one request; raises a `TokenyardError` where the broker does not answer."""
        accepted: asyncio.Future[Acceptance] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, priority_class, refuse_late, accepted))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="gateway-submit")
        return await accepted

    async def _send(self) -> None:
        try:
            while self._waiting:
                burst, self._waiting = self._waiting, []
                groups = defaultdict(list)
                for one in burst:
                    groups[one.priority_class, one.refuse_late].append(one)
                for (priority_class, refuse_late), group in groups.items():
                    await self._send_group(group, priority_class, refuse_late=refuse_late)
        finally:
            self._sending = None

    async def _send_group(
        self, group: list[_Waiting], priority_class: PriorityClass, *, refuse_late: bool
    ) -> None:
        requests = [one.request for one in group]
        try:
            wanted = scripts.submit(self._keys, priority_class, requests, refuse_late=refuse_late)
            answers = await call(self._connection, self._url, wanted)
        except TokenyardError as error:
            _fail(group, error)
            return
        except Exception as error:  # noqa: BLE001 - whatever a value that cannot be written raises
            if len(group) == 1:
                _fail(group, ValueError(f"the request cannot be written: {error}"))
                return
            for one in group:  # those beside it can be written
                await self._send_group([one], priority_class, refuse_late=refuse_late)
            return
        for one, answer in zip(group, answers, strict=True):
            if not one.accepted.done():
                one.accepted.set_result(answer)


def _fail(group: list[_Waiting], error: Exception) -> None:
    for one in group:
        if not one.accepted.done():
            one.accepted.set_exception(error)
