"""Submits requests; those of one moment share a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.queue.bursts import Bursts
from gateway.queue.calls import Command, call_behind
from tokenyard import scripts
from tokenyard.broker.connection import AsyncRedis
from tokenyard.protocol.keys import Keys, PriorityClass
from tokenyard.protocol.wire import Request
from tokenyard.scripts import Acceptance


@dataclass(frozen=True, slots=True)
class _Submission:
    request: Request
    priority_class: PriorityClass
    refuse_late: bool
    before: Sequence[Command]


class BurstSubmitter:
    """Submits requests in bursts."""

    def __init__(self, connection: AsyncRedis, url: str, keys: Keys) -> None:
        self._connection = connection
        self._url = url
        self._keys = keys
        self._bursts = Bursts(self._send)

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
        return await self._bursts.ask(_Submission(request, priority_class, refuse_late, before))

    async def _send(self, burst: Sequence[_Submission]) -> list[Acceptance]:
        groups = defaultdict(list)
        for place, one in enumerate(burst):
            groups[one.priority_class, one.request.tenant, one.refuse_late].append(place)
        calls = [
            scripts.submit(
                self._keys, name, [burst[place].request for place in group], refuse_late=refuse_late
            )
            for (name, _, refuse_late), group in groups.items()
        ]
        before = [command for one in burst for command in one.before]
        found = await call_behind(self._connection, self._url, before, calls)
        of_place = {
            place: answer
            for group, answers in zip(groups.values(), found, strict=True)
            for place, answer in zip(group, answers, strict=True)
        }
        return [of_place[place] for place in range(len(burst))]
