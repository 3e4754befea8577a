"""Requests of tenants that a test submits, dispatches and ends, and what is counted for them."""

from __future__ import annotations

import msgspec

from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.replies import ErrorInfo, Reply, Usage, json_text
from tokenyard.protocol.wire import Assignment, pack_tokens
from tokenyard.scripts.answers import CancelledUse, Charge, Dispatched, Publication

TOKENS = 10  # of each prompt here


def submit(
    yard: PlayedYard, tenant: str = "acme", priority_class: PriorityClass = "normal"
) -> QueuedRequest:
    """Submit a request of a tenant."""
    return yard.submit(make_request(tenant=tenant, tokens=range(TOKENS)), priority_class)


def dispatch(
    yard: PlayedYard, worker: str, waiting: QueuedRequest, amount: float = 100
) -> Assignment:
    """Charge a waiting request and move it onto a lane."""
    tenant = waiting.request.tenant
    charge = Charge(tenant, amount, 1.0, 2.0, "adder")
    move = msgspec.structs.replace(waiting.to(worker), charge=charge)
    assert yard.scripts.dispatch(yard.token, [move]) == [Dispatched.DISPATCHED]
    return yard.lane(worker)[-1]


def result(
    assignment: Assignment, output: int = 3, status: str = "completed", code: str = ""
) -> Publication:
    """A result with so many tokens, and the code of an error."""
    usage = msgspec.json.encode(Usage(TOKENS, output, TOKENS + output, 4)).decode()
    reply = Reply(
        id=assignment.request.id,
        event="result",
        seq=0,
        tokens=pack_tokens(range(output)),
        status=status,
        usage=usage,
        error=json_text(ErrorInfo(code, "")) if code else None,
    )
    return Publication(assignment, reply)


def generated(assignment: Assignment, output: int, tokens: int | None = TOKENS) -> CancelledUse:
    """What its engine had used for a request."""
    request = assignment.request
    return CancelledUse(request.client, request.id, assignment.entry, tokens, output=output)


def line(yard: PlayedYard) -> dict[str, float]:
    """Who is in line, with what they have had."""
    return {
        tenant.decode(): had
        for tenant, had in yard.connection.zrange(yard.keys.line, 0, -1, withscores=True)
    }


def service(yard: PlayedYard, tenant: str = "acme") -> float | None:
    return yard.connection.zscore(yard.keys.service, tenant)


def counts(yard: PlayedYard, tenant: str = "acme") -> dict[str, int]:
    """The counts of a tenant that are not 0."""
    fields = yard.connection.hgetall(yard.keys.tenant(tenant))
    return {
        name.decode(): int(count)
        for name, count in fields.items()
        if count.isdigit() and int(count)
    }


def usage(yard: PlayedYard, tenant: str = "acme") -> dict[str, int]:
    """What a tenant has used, without the day and the waits."""
    fields = yard.connection.hgetall(yard.keys.usage(tenant))
    named = {name.decode().partition(" ")[2]: int(count) for name, count in fields.items()}
    return {name: count for name, count in named.items() if " wait:" not in name}
