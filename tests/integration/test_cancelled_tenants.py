"""What a tenant pays for running requests that it cancels: what the engine had generated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.tenants import TenantYard
from tests.support.waiting import eventually
from tokenyard.protocol.tenants import MINUTE, TenantSettings, encode_tenant
from tokenyard.protocol.wire import Assignment, Request, SamplingParams
from tokenyard.scripts.answers import CancelledUse

STEP_S = 0.02
TOKENS, MOST = 10, 8000
ACME = "acme"


@pytest.fixture
def slow(plant: Plant) -> Plant:
    """A yard with a worker that makes a token every `STEP_S`, for three requests at a time."""
    settings = encode_tenant(TenantSettings(tokens_per_minute=100_000))
    plant.connection.hset(plant.keys.tenants, ACME, settings)
    plant.coordinator()
    plant.wait_for_leader()
    plant.worker(simulated_step_s=STEP_S, max_num_seqs=3)
    plant.wait_for_workers(1)
    return plant


def ask(plant: Plant, *, stream: bool) -> Request:
    request = make_request(
        tokens=range(TOKENS),
        tenant=ACME,
        stream=stream,
        params=SamplingParams(max_tokens=MOST, ignore_eos=True),
    )
    (accepted,) = plant.scripts.submit("normal", [request])
    assert accepted.sid
    return request


def settled(plant: Plant, request: Request) -> tuple[int, int]:
    """The tokens in and out that a cancelled request has paid, once its worker has said so."""

    def paid() -> str | None:
        ledger = plant.ledger(request.id, request.client)
        return None if "charge" in ledger else ledger.get("used")

    tokens_in, _, tokens_out = eventually(paid).partition(" ")
    return int(tokens_in), int(tokens_out)


def counted(plant: Plant) -> Counter[str]:
    fields = plant.connection.hgetall(plant.keys.usage(ACME))
    return Counter({name.decode().split()[-1]: int(count) for name, count in fields.items()})


def reserved(plant: Plant) -> int:
    """The tokens that count for the limit of a minute."""
    now, _ = plant.connection.time()
    fields = plant.connection.hmget(plant.keys.tenant(ACME), MINUTE.fields)
    return MINUTE.read(fields, now * 1000)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_cancelled_amid_its_answer_pays_what_was_generated(
    slow: Plant, stream: bool
) -> None:
    # Given a request between two streams whose tokens tell the steps, and one that waits
    first = ask(slow, stream=True)
    eventually(lambda: slow.published(first.id))
    request = ask(slow, stream=stream)
    eventually(lambda: slow.ledger(request.id).get("state") == "assigned")
    last = ask(slow, stream=True)
    eventually(lambda: slow.published(last.id))
    waiting = ask(slow, stream=stream)
    eventually(lambda: slow.ledger(waiting.id).get("state") == "assigned")
    steps = eventually(lambda: (made := slow.published(last.id)) > 50 and made)

    # If both are cancelled, and the two streams once the request between them has ended
    for one in (waiting, request):
        slow.scripts.cancel(one.client, one.id, "enough")
    shown = len(slow.result(request.id).tokens)
    tokens_in, tokens_out = settled(slow, request)
    for one in (last, first):
        slow.scripts.cancel(one.client, one.id, "enough")

    # I expect it to pay its steps, and the one that waited only its prompt.
    most, less = settled(slow, first)[1], settled(slow, last)[1]
    assert tokens_in == TOKENS
    assert max(steps, shown) <= tokens_out <= most
    assert settled(slow, waiting) == (TOKENS, 0)
    all_in, all_out = 4 * TOKENS, most + tokens_out + less
    assert slow.connection.zscore(slow.keys.service, ACME) == all_in + 2 * all_out
    used = counted(slow)
    assert (used["requests"], used["cancelled"]) == (4, 4)
    assert (used["in"], used["out"]) == (all_in, all_out)
    assert reserved(slow) == all_in + all_out


class Impatient:
    """A worker that the test plays, whose tenants may cancel when an answer is nearly made."""

    def __init__(self, yard: TenantYard, worker: str) -> None:
        self.generated: Counter[str] = Counter()
        self._yard = yard
        self._worker = worker

    def run(self, count: int, *, cancelling: str) -> None:
        assert self._yard.leader is not None
        self._yard.rest()
        for _ in range(count):
            one = self._yard.lane(self._worker)[0]
            tenant, most = one.request.tenant, one.request.params.max_tokens or 0
            made = most * 9 // 10 if tenant == cancelling else most
            self.generated[tenant] += made
            if tenant == cancelling:
                self._cancel(one, made)
            else:
                self._yard.end(self._worker, one)
            self._yard.leader.run_once()

    def _cancel(self, one: Assignment, made: int) -> None:
        """Cancel, and do what a worker does then."""
        request = one.request
        self._yard.scripts.cancel(request.client, request.id, "enough")
        lane = self._yard.keys.lane(self._worker)
        for entry, fields in self._yard.connection.xrange(lane):
            if b"cancel" in fields:
                self._yard.connection.xdel(lane, entry)
        said: dict[Any, Any] = {"event": "capacity", "worker": self._worker, "count": 1}
        self._yard.connection.xadd(self._yard.keys.capacity, said)
        tokens = len(request.tokens or b"") // 4
        used = CancelledUse(request.client, request.id, one.entry, tokens, output=made)
        self._yard.scripts.settle_cancelled(self._worker, [used])


def test_a_tenant_that_always_cancels_gets_no_more_than_others(broker: Server) -> None:
    with TenantYard(broker.url) as yard:
        # Given two tenants with much to do, one of which cancels each answer at nine tenths
        worker = yard.worker(lane_limit=1)
        for tenant in ("fair", "hasty"):
            yard.ask(tenant, 80, tokens=10, output=100)
        yard.lead()
        played = Impatient(yard, worker)

        played.run(60, cancelling="hasty")

        # I expect it to have had no more engine time than the other one, within an answer.
        assert played.generated["hasty"] <= played.generated["fair"] + 100
        assert abs(yard.service("fair") - yard.service("hasty")) <= 10 + 2 * 100
