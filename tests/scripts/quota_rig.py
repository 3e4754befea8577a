"""A tenant with limits, whose requests all have the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tests.scripts.tenant_rig import TOKENS
from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.scripts.answers import Acceptance, Submitted

ACCEPTED, QUOTA = Submitted.ACCEPTED, Submitted.QUOTA
#: Tokens of a request of these tests, prompt and answer.
MOST = 20
EACH = TOKENS + MOST
#: A bucket of each window in ms, and the buckets that count.
WIDTH = {"tokens_per_minute": ("m", 5_000, 13), "tokens_per_day": ("d", 1_800_000, 49)}
WINDOWS = sorted(WIDTH)


def limit(yard: PlayedYard, tenant: str = "acme", **limits: object) -> None:
    """Set the limits of a tenant."""
    yard.connection.hset(yard.keys.tenants, tenant, encode_tenant(TenantSettings(**limits)))


def ask(tenant: str = "acme", **fields: object) -> Request:
    params = fields.pop("params", SamplingParams(max_tokens=MOST))
    return make_request(tenant=tenant, tokens=range(TOKENS), params=params, **fields)


def submit(yard: PlayedYard, count: int = 1, priority_class="normal") -> Sequence[Acceptance]:
    return yard.scripts.submit(priority_class, [ask() for _ in range(count)])


def accept(yard: PlayedYard) -> QueuedRequest:
    """Submit one request, which must be accepted."""
    return yard.submit(ask())


def codes(answers: Sequence[Acceptance]) -> list[Submitted]:
    return [answer.code for answer in answers]


def counted(yard: PlayedYard, window: str) -> int:
    """The tokens that a window counts."""
    mark = WIDTH[window][0]
    fields = yard.connection.hgetall(yard.keys.tenant("acme"))
    rings = [
        text for name, text in fields.items() if name[:1] == mark.encode() and name[1:].isdigit()
    ]
    return sum(int(text.split()[1]) for text in rings)
