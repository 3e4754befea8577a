"""A big yard for `benchmarks.board`: workers, waiting requests, dead letters and tenants."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.progress import tell
from benchmarks.scale.backlog import Side
from benchmarks.scale.yard import Fleet, Yards, scale_yards
from tokenyard.broker.connection import open_connection
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.wire import Request, pack_tokens, request_fields

#: What one pipeline writes at once.
_PAGE: Final = 1_000
_PROMPT: Final = pack_tokens(range(128))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is of everything."""

    workers: int = 1_000
    waiting: int = 100_000
    dead: int = 10_000
    tenants: int = 10_000
    ended: int = 1_000


@contextmanager
def big_yard(broker: EmbeddedBroker, sizes: Sizes) -> Iterator[Yards]:
    """Run a yard of these sizes, whose workers keep their leases and answer nothing more."""
    # Lanes of one place each, so that what waits stays in the intakes.
    with scale_yards(broker, Fleet(workers=sizes.workers, max_num_seqs=1)) as yards:
        connection = open_connection(yards.url)
        yard = Yard(connection, Keys(yards.names[0]), yards.url)
        tell(f"board: {sizes}")
        _settle_tenants(yard, sizes.tenants)
        _bury(yard, sizes.dead)
        side = Side(yards, sizes.tenants)
        side.fill(sizes.waiting + sizes.ended)
        side.drain(sizes.ended)
        side.fill(sizes.waiting + _on_lanes(yard))
        yield yards
        connection.close()


def _on_lanes(yard: Yard) -> int:
    """Requests that wait no more, but for a worker that rests."""
    workers: Any = yard.connection.zrange(yard.keys.leases, 0, -1)
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for worker in workers:
        pipeline.xlen(yard.keys.lane(worker.decode()))
    return sum(pipeline.execute())


def _settle_tenants(yard: Yard, count: int) -> None:
    today = f"{datetime.datetime.now(datetime.UTC):%Y%m%d}"
    for first in range(0, count, _PAGE):
        pipeline: Any = yard.connection.pipeline(transaction=False)
        for number in range(first, min(first + _PAGE, count)):
            name = f"tenant-{number:05d}"  # as `Side` names them
            settings = TenantSettings(weight=1 + number % 4, tokens_per_day=10**9)
            pipeline.hset(yard.keys.tenants, name, encode_tenant(settings))
            usage = {"requests": number, "in": 128 * number, "out": 32 * number, "wait:1024": 1}
            fields = {f"{today} simulated {what}": value for what, value in usage.items()}
            pipeline.hset(yard.keys.usage(name), mapping=fields)
        pipeline.execute()


def _bury(yard: Yard, count: int) -> None:
    for first in range(0, count, _PAGE):
        pipeline: Any = yard.connection.pipeline(transaction=False)
        for number in range(first, min(first + _PAGE, count)):
            request = Request(id=f"dead-{number}", client="poisoned", tokens=_PROMPT)
            reason = f"crashed the engines of {2 + number % 3} workers: CUDA error {number % 7}"
            told = {"dead_reason": reason, "dead_sid": f"normal/1-{number}"}
            pipeline.xadd(yard.keys.dead, {**request_fields(request), **told})
        pipeline.execute()
