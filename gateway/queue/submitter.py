"""Submits requests; those of one moment share a call."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.queue.calls import Command, call_behind
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
    before: Sequence[Command]
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
        self,
        request: Request,
        priority_class: PriorityClass,
        *,
        refuse_late: bool,
        before: Sequence[Command] = (),
    ) -> Acceptance:
        """Submit one request; raises a `TokenyardError` where the broker does not answer.

        The commands ``before`` are carried out with it, and have their effect first.
        """
        accepted: asyncio.Future[Acceptance] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, priority_class, refuse_late, before, accepted))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="gateway-submit")
        return await accepted

    async def _send(self) -> None:
        try:
            while self._waiting:
                burst, self._waiting = self._waiting, []
                await self._send_burst(burst)
        finally:
            self._sending = None

    async def _send_burst(self, burst: Sequence[_Waiting]) -> None:
        try:
            await self._send_together(burst)
        except TokenyardError as error:
            _fail(burst, error)
        except Exception as error:  # noqa: BLE001 - whatever a value that cannot be written raises
            if len(burst) == 1:
                _fail(burst, ValueError(f"the request cannot be written: {error}"))
                return
            for one in burst:  # those beside it can be written
                await self._send_burst([one])

    async def _send_together(self, burst: Sequence[_Waiting]) -> None:
        groups = defaultdict(list)
        for one in burst:
            groups[one.priority_class, one.request.tenant, one.refuse_late].append(one)
        calls = [
            scripts.submit(
                self._keys, name, [one.request for one in group], refuse_late=refuse_late
            )
            for (name, _, refuse_late), group in groups.items()
        ]
        before = [command for one in burst for command in one.before]
        found = await call_behind(self._connection, self._url, before, calls)
        for group, answers in zip(groups.values(), found, strict=True):
            for one, answer in zip(group, answers, strict=True):
                if not one.accepted.done():
                    one.accepted.set_result(answer)


def _fail(burst: Sequence[_Waiting], error: Exception) -> None:
    for one in burst:
        if not one.accepted.done():
            one.accepted.set_exception(error)
