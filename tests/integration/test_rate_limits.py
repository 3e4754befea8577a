"""The headers that tell a gateway's client what the limits of its tenant leave."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.context import RequestContext
from gateway.queue.calls import Broker
from gateway.queue.yard import RateLimits, duration
from tests.integration.operating import Opened
from tests.support.tenants import TenantYard
from tokenyard.broker.connection import open_async_connection
from tokenyard.protocol.tenants import DAY, MINUTE

EACH = 10 + 20  # tokens of a request of these tests


@pytest.fixture
def lanes(opened: Opened) -> TenantYard:
    return opened(TenantYard)


def headers(lanes: TenantYard, tenant: str = "acme", eta_ms: int = -1) -> dict[str, str]:
    async def read() -> list[tuple[bytes, bytes]]:
        connection = open_async_connection(lanes.url)
        try:
            return await RateLimits(Broker(connection, lanes.url, lanes.keys)).headers(
                tenant, eta_ms
            )
        finally:
            await connection.aclose()

    return {name.decode(): value.decode() for name, value in asyncio.run(read())}


def seconds(text: str) -> float:
    minutes, _, rest = text.rpartition("m") if "m" in text and "ms" not in text else ("0", "", text)
    hours, _, minutes = minutes.rpartition("h")
    return int(hours or 0) * 3600 + int(minutes) * 60 + float(rest.removesuffix("s"))


@pytest.mark.parametrize("window", [MINUTE, DAY])
def test_tokens_are_those_that_the_scripts_count(lanes: TenantYard, window) -> None:
    lanes.set("acme", **{window.limit: 4 * EACH})
    before_ms = lanes.now_ms
    lanes.ask("acme", 3)
    submitted_ms = lanes.now_ms
    found = headers(lanes)
    left_s = seconds(found.pop("x-ratelimit-reset-tokens"))
    assert found == {
        "x-ratelimit-limit-tokens": str(4 * EACH),
        "x-ratelimit-remaining-tokens": str(EACH),
    }
    first, last = before_ms // window.width_ms, submitted_ms // window.width_ms
    least_ms = (first + window.count) * window.width_ms - lanes.now_ms
    most_ms = (last + window.count) * window.width_ms - submitted_ms
    assert least_ms / 1000 - 1 <= left_s <= most_ms / 1000, "whole seconds are told"


def test_the_minute_is_told_where_both_are_limited(lanes: TenantYard) -> None:
    lanes.set("acme", tokens_per_minute=100, tokens_per_day=1000)
    assert headers(lanes) == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "0s",
    }


def test_requests_are_those_that_wait(lanes: TenantYard) -> None:
    lanes.set("acme", max_waiting_requests=5)
    assert headers(lanes)["x-ratelimit-reset-requests"] == "0s"
    lanes.ask("acme", 2)
    assert headers(lanes, eta_ms=2500) == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "2.5s",
    }


def test_without_such_limits_there_are_none(lanes: TenantYard) -> None:
    lanes.ask("acme")
    assert headers(lanes) == {}
    lanes.set("acme", max_running_requests=3)
    assert headers(lanes) == {}
    lanes.connection.hset(lanes.keys.tenants, "acme", "no JSON")
    assert headers(lanes) == {}
    assert headers(lanes, tenant="") == {}


def test_odd_values_are_passed_over(lanes: TenantYard) -> None:
    lanes.set("acme", tokens_per_minute=100, max_waiting_requests=1)
    odd = {"m0": "x", "m1": "1 x", "m2": "9" * 40 + " 1", "m3": b"\xff", "waiting": "many"}
    lanes.connection.hset(lanes.keys.tenant("acme"), mapping=odd)
    found = headers(lanes)
    assert found["x-ratelimit-remaining-tokens"] == "100"
    assert found["x-ratelimit-remaining-requests"] == "1"


def test_they_are_among_the_headers_of_the_answer() -> None:
    context = RequestContext(durable_id="d", client="http", created=0.0)
    context.rate_limits = [(b"x-ratelimit-limit-tokens", b"5")]
    assert context.headers() == [(b"x-request-id", b"d"), (b"x-ratelimit-limit-tokens", b"5")]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (250, "250ms"),
        (1500, "1.5s"),
        (60000, "1m0s"),
        (361000, "6m1s"),
        (7203000, "2h0m3s"),
        (-5, "0s"),
    ],
)
def test_durations(ms: int, text: str) -> None:
    assert duration(ms) == text
