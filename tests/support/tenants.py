"""A yard with tenants, whose coordinator takes a turn when the test says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from coordinator.coordinator import Coordinator
from tests.support.builders import make_request, make_result
from tests.support.lanes import Lanes
from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.replies import Usage
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.wire import Assignment, Request, SamplingParams
from tokenyard.scripts.answers import Publication

#: So many turns in a row must change nothing before a yard is at rest.
CALM = 3


class TenantYard(Lanes):
    """`Lanes` with tenants and with coordinators that run in the test's own thread."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.leader: Coordinator | None = None
        self._number = 0

    def lead(self, **values: Any) -> Coordinator:
        """A new coordinator takes the lead; an earlier one stops without a word."""
        if self.leader:
            self.connection.delete(self.keys.leader)
        self.leader = Coordinator(self.settings(**{"block_ms": 1, **values}))
        self._stack.callback(self.leader._connection.close)
        self.rest()
        return self.leader

    def rest(self, most: int = 200) -> None:
        """Turns until nothing changes any more."""
        assert self.leader is not None
        calm = 0
        for _ in range(most):
            before = self._state()
            self.leader.run_once()
            calm = calm + 1 if self._state() == before else 0
            if calm == CALM:
                return
        raise AssertionError("the yard does not come to rest")

    def _state(self) -> tuple[int, ...]:
        """What a turn can change: requests in the intakes and on the lanes."""
        loads = [self.load(worker.decode()) for worker in self.connection.hkeys(self.keys.workers)]
        line = self.line()
        return (*loads, self.waiting(), len(line), sum(map(self.waits, line)))

    # Tenants

    def set(self, tenant: str, **settings: Any) -> None:
        """Set a tenant as an operator does."""
        packed = encode_tenant(TenantSettings(**settings))
        self.connection.hset(self.keys.tenants, tenant, packed)
        self.connection.xadd(self.keys.events, {"event": "tenants"})

    def ask(
        self,
        tenant: str,
        count: int = 1,
        *,
        tokens: int = 10,
        output: int = 20,
        priority_class: PriorityClass = "normal",
        **fields: Any,
    ) -> list[Request]:
        """Submit so many requests of a tenant."""
        requests = []
        for _ in range(count):
            self._number += 1
            requests.append(
                make_request(
                    f"{tenant or 'none'}-{self._number:05}",
                    tokens=range(tokens),
                    tenant=tenant,
                    params=SamplingParams(max_tokens=output),
                    **fields,
                )
            )
        self.scripts.submit(priority_class, requests)
        return requests

    def line(self) -> dict[str, float]:
        """The tenants in line, with their service."""
        items = self.connection.zrange(self.keys.line, 0, -1, withscores=True)
        return {name.decode(): service for name, service in items}

    def service(self, tenant: str) -> float:
        """What a tenant has had, by the counter."""
        return float(self.connection.zscore(self.keys.service, tenant) or 0.0)

    def waits(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        names = ("high", "normal", "low")
        suffix = f":{tenant}" if tenant else ""
        return sum(self.connection.xlen(self.keys.intake(f"{one}{suffix}")) for one in names)

    def end(
        self, worker: str, *assignments: Assignment, output: int | None = None, cached: int = 0
    ) -> None:
        """Finish requests with so many tokens each, as many as they may have by default."""
        items = []
        for one in assignments:
            tokens = len(one.request.tokens or b"") // 4
            made = one.request.params.max_tokens or 0 if output is None else output
            usage = Usage(tokens, made, tokens + made, min(cached, tokens))
            result = make_result(
                one.request.id, range(made), usage=msgspec.json.encode(usage).decode()
            )
            items.append(Publication(one, result))
        self.scripts.finish(worker, items)

    def run(self, worker: str, count: int, output: int | None = None) -> list[str]:
        """Serve so many requests, one at a time, a turn each; their ids in that order."""
        assert self.leader is not None
        served: list[str] = []
        self.rest()
        while len(served) < count:
            lane = self.lane(worker)
            assert lane, f"nothing is left after {len(served)}"
            self.end(worker, lane[0], output=output)
            served.append(lane[0].request.id)
            self.leader.run_once()
        return served


def tenants(ids: Sequence[str]) -> Counter[str]:
    """How many requests of each tenant there are."""
    return Counter(one.rpartition("-")[0] for one in ids)


@contextmanager
def commands(yard: TenantYard) -> Iterator[Callable[[], list[str]]]:
    """The names of the commands that anybody sends to the server in the meantime."""
    with yard.connection.monitor() as monitor:
        seen: list[str] = []

        def read() -> list[str]:
            yard.connection.echo("end")
            for item in monitor.listen():
                if item["command"].startswith("ECHO"):
                    return seen
                is_inside = item["client_type"] == "lua"  # of a script
                if not is_inside and not item["command"].startswith(("HELLO", "CLIENT")):
                    seen.append(item["command"])
            return seen

        yield read
