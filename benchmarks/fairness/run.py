"""One run of `benchmarks.fairness`: tenants ask a yard, each at its rate, whatever comes back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import redis

from benchmarks.fairness.figures import Sample, Window
from benchmarks.fairness.loads import MAX_TOKENS, Ask, Speed, Tenant
from benchmarks.yard import ServingYard
from tokenyard import AsyncClient
from tokenyard.client.aio import AsyncHandle
from tokenyard.client.options import FullPrompt
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Timing
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from worker.host.membership import lane_limit

Policy = Literal["fifo", "round_robin", "vtc", "tenants"]
#: Seconds between two batches of a tenant that asks more often.
TICK_S: Final = 0.05
#: Longer than any run, so that no wait ends before it.
_PATIENCE_S: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Phases:
    """The parts of a run in seconds."""

    warm_s: float  # the queue fills, and the lanes
    measured_s: float
    #: The load goes on, so that what is measured ends under it.
    after_s: float

    @property
    def window(self) -> Window:
        """What counts."""
        return Window(self.warm_s, self.warm_s + self.measured_s)

    @property
    def all_s(self) -> float:
        """The whole run."""
        return self.warm_s + self.measured_s + self.after_s


@dataclass(frozen=True, slots=True)
class Due:
    """A request that a tenant makes now."""

    tenant: str
    due_s: float
    ask: Ask
    streams: bool


class VirtualTokenCounter:
    """Requests by tenant; the next is of the tenant that has had the least.

    It counts in the memory of one process, as the reference for the yard's. Sheng et al., Fairness
    in Serving Large Language Models, OSDI 2024, arXiv 2401.00588, algorithm 4: with weights, and
    with the length of each answer known beforehand, which no real queue knows.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._service = dict.fromkeys(weights, 0.0)
        self._waiting: dict[str, deque[Due]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tenant: str, due: Due) -> None:
        """Put a request behind those of its tenant; a rest before it was not saved up."""
        queue = self._waiting.get(tenant)
        if queue is None:
            least = min((self._service[other] for other in self._waiting), default=0.0)
            self._service[tenant] = max(self._service[tenant], least)
            queue = self._waiting[tenant] = deque()
        queue.append(due)

    def take(self) -> Due:
        """Take out the next request, and charge its tenant for it."""
        tenant = min(self._waiting, key=self._service.__getitem__)
        queue = self._waiting[tenant]
        due = queue.popleft()
        self._service[tenant] += due.ask.service / self._weights[tenant]
        if not queue:
            del self._waiting[tenant]
        return due


class _Port(Protocol):
    """The way of a policy into the yard."""

    async def ask(self, tenant: Tenant, due: Sequence[Due]) -> None:
        """Submit these, and note a sample of each once it is answered."""


class _Notes:
    """Requests under way, and the samples of all."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._open: dict[asyncio.Task[None], Due] = {}
        self.samples: list[Sample] = []

    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._began

    def follow(self, due: Due, handle: AsyncHandle) -> asyncio.Task[None]:
        """Note the sample of a request once it is answered."""
        task = asyncio.create_task(self._wait(due, handle))
        self._open[task] = due
        return task

    async def _wait(self, due: Due, handle: AsyncHandle) -> None:
        result = await handle.wait()
        done_s = self.now_s()
        timing = result.timing or Timing(0)
        self.samples.append(
            Sample(
                due.tenant,
                due.ask,
                due.due_s,
                done_s,
                engine_s=(timing.engine_ms or 0.0) / 1000,
                first_token_s=(timing.first_token_ms or 0.0) / 1000,
                is_right=result.ok and result.tokens == due.ask.answer,
            )
        )

    async def close(self) -> None:
        """Give up what is unanswered, and note it so."""
        for task, due in self._open.items():
            if not task.done():
                task.cancel()
                self.samples.append(Sample(due.tenant, due.ask, due.due_s))
        for ended in await asyncio.gather(*self._open, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


class _Direct:
    """Everything goes to the yard at once, by the client of its tenant."""

    def __init__(
        self, clients: Mapping[str, AsyncClient], notes: _Notes, *, with_names: bool
    ) -> None:
        self._clients = clients
        self._notes = notes
        self._with_names = with_names

    async def ask(self, tenant: Tenant, due: Sequence[Due]) -> None:
        name = tenant.name if self._with_names else ""
        handles = await _submit(self._clients[tenant.name], due, tenant=name)
        for one, handle in zip(due, handles, strict=True):
            self._notes.follow(one, handle)


class _Front:
    """A scheduler before the yard that gives it no more than fits on its lanes."""

    def __init__(
        self, client: AsyncClient, notes: _Notes, weights: Mapping[str, float], places: int
    ) -> None:
        self._client = client
        self._notes = notes
        self._queue = VirtualTokenCounter(weights)
        self._places = places
        self._may_go = asyncio.Event()
        self._is_over = False

    async def ask(self, tenant: Tenant, due: Sequence[Due]) -> None:
        for one in due:
            self._queue.add(tenant.name, one)
        self._may_go.set()

    async def run(self) -> None:
        """Submit what is next whenever there is a place, until `stop`."""
        while not self._is_over:
            await self._may_go.wait()
            due = list(self._next())
            handles = await _submit(self._client, due) if due else []
            for one, handle in zip(due, handles, strict=True):
                self._notes.follow(one, handle).add_done_callback(self._on_end)

    def _next(self) -> Iterator[Due]:
        self._may_go.clear()
        while self._queue and self._places:
            self._places -= 1
            yield self._queue.take()

    def _on_end(self, _: object) -> None:
        self._places += 1
        self._may_go.set()

    def stop(self) -> None:
        """Submit no more."""
        self._is_over = True
        self._may_go.set()

    def waiting(self) -> list[Due]:
        """Take out what was never submitted."""
        found = []
        while self._queue:
            found.append(self._queue.take())
        return found


async def _submit(
    client: AsyncClient, due: Sequence[Due], *, tenant: str = ""
) -> list[AsyncHandle]:
    items = [
        FullPrompt(prompt=one.ask.prompt, stop_token_ids=one.ask.answer[-1:], stream=one.streams)
        for one in due
    ]
    return await client.submit_many(
        items, tenant=tenant, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
    )


class Load:
    """Tenants of a yard, under one policy; each `run` is a load of some of them."""

    def __init__(
        self, yard: ServingYard, policy: Policy, speed: Speed, stack: AsyncExitStack
    ) -> None:
        self._yard = yard
        self._policy = policy
        self._places = speed.workers * lane_limit(speed.max_num_seqs)
        self._stack = stack
        self._clients: dict[str, AsyncClient] = {}

    async def run(self, tenants: Sequence[Tenant], phases: Phases) -> list[Sample]:
        """Ask as long as that takes; returns all samples."""
        clients = {tenant.name: await self._client(tenant.name) for tenant in tenants}
        notes = _Notes()
        weights = {tenant.name: tenant.weight for tenant in tenants}
        front = _Front(next(iter(clients.values())), notes, weights, self._places)
        direct = _Direct(clients, notes, with_names=self._policy == "tenants")
        port: _Port = front if self._policy == "vtc" else direct
        # Each ends by itself: a submission that is cancelled may lose its cancellation.
        submitting = asyncio.create_task(front.run())
        await asyncio.gather(*(_ask(port, tenant, notes, phases.all_s) for tenant in tenants))
        front.stop()
        await submitting
        for one in front.waiting():
            notes.samples.append(Sample(one.tenant, one.ask, one.due_s))
        await notes.close()
        return notes.samples

    async def _client(self, name: str) -> AsyncClient:
        """The tenant's own, where the policy tells clients apart."""
        name = name if self._policy in ("round_robin", "tenants") else "all"
        if name not in self._clients:
            client = AsyncClient(
                self._yard.url, self._yard.name, name, result_timeout_s=_PATIENCE_S
            )
            self._clients[name] = await self._stack.enter_async_context(client)
        return self._clients[name]


async def _ask(port: _Port, tenant: Tenant, notes: _Notes, until_s: float) -> None:
    """Ask at the tenant's rate, together what is due in the same tick."""
    asks = itertools.cycle(tenant.asks)
    made = 0
    tick_s = max(TICK_S, 1 / tenant.rate)
    for tick in itertools.count(1):
        at_s = tenant.at_s + (tick - 1) * tick_s
        await asyncio.sleep(max(0.0, min(at_s, until_s) - notes.now_s()))
        if at_s >= until_s or notes.now_s() >= until_s:
            return
        count = round(tick * tick_s * tenant.rate) - made
        made += count
        now_s = notes.now_s()
        await port.ask(
            tenant, [Due(tenant.name, now_s, next(asks), tenant.is_light) for _ in range(count)]
        )


@asynccontextmanager
async def open_load(yard: ServingYard, policy: Policy, speed: Speed) -> AsyncIterator[Load]:
    """A load on a yard, whose clients are closed at the end."""
    async with AsyncExitStack() as stack:
        yield Load(yard, policy, speed, stack)


def set_weights(yard: ServingYard, tenants: Iterable[Tenant]) -> None:
    """Give each tenant its weight, before its first request."""
    settings = {one.name: encode_tenant(TenantSettings(weight=one.weight)) for one in tenants}
    with redis.Redis.from_url(yard.url, socket_timeout=10.0) as connection:
        connection.hset(Keys(yard.name).tenants, mapping=settings)
