"""What the passage of time does in a whole yard: deadlines, leases, limits, results kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import worker.process.loop
from tests.support.builders import make_request
from tests.support.fake_clock import FakeClock, faked
from tests.support.set_server import SetServer
from tests.support.timed_yard import LEASE_MS, TimedYard
from tokenyard.protocol.replies import to_result
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.wire import SamplingParams
from tokenyard.scripts.answers import Submitted
from tokenyard.scripts.client import CLIENT_LEASE_MS

LEASE_S = LEASE_MS // 1000
LONG = SamplingParams(max_tokens=1000)


@pytest.fixture(scope="module")
def server(
    no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SetServer]:
    running = SetServer(tmp_path_factory.mktemp("set"))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def held_clock() -> Iterator[FakeClock]:
    with faked(is_held=True) as clock:
        yield clock


@pytest.fixture
def yard(
    server: SetServer, held_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TimedYard]:
    """A leader and a worker with room for one request."""
    monkeypatch.setattr(worker.process.loop, "IDLE_WAIT_S", 0.01)
    opened = TimedYard(server, held_clock)
    opened.start_coordinator("one")
    opened.start_worker("a", max_num_seqs=1)
    yield opened
    opened.close()


def state(yard: TimedYard, request_id: str) -> object:
    return yard.connection.hget(yard.keys.ledger("anon", request_id), "state")


def tokens(yard: TimedYard, request_id: str) -> int:
    """How many tokens are published."""
    return int(yard.connection.strlen(yard.keys.tokens("anon", request_id))) // 4


def test_deadlines_end_what_runs_and_what_waits(yard: TimedYard) -> None:
    # Given requests with a minute: one that runs, one on the lane behind it, one in the intake
    told: Any = yard.connection.time()
    deadline_ms = 1000 * int(told[0]) + 60_000
    names = ("runs", "placed", "waits")
    yard.push(
        [make_request(one, stream=True, params=LONG, deadline_ms=deadline_ms) for one in names]
    )
    yard.until(lambda: tokens(yard, "runs") > 3 and state(yard, "placed") == b"assigned")
    assert state(yard, "waits") != b"assigned"
    # If not quite as much time goes by, I expect none to end,
    yard.pass_time(30)
    assert not {state(yard, one) for one in names} & {b"expired", b"failed"}
    # and all of them a little later, with the tokens so far.
    yard.pass_time(32)
    yard.until(lambda: {state(yard, one) for one in names} == {b"expired"})
    ended = {one: to_result(yard.result(one)) for one in names}
    assert len(ended["runs"].tokens) > 30
    assert [len(ended[one].tokens) for one in ("placed", "waits")] == [0, 0]


def test_a_silent_host_loses_its_requests_when_its_lease_is_over(yard: TimedYard) -> None:
    yard.push([make_request("q", stream=True, params=LONG)])
    yard.until(lambda: tokens(yard, "q") > 3)
    # If its host falls silent while another is there
    yard.workers["a"].is_away = True
    yard.start_worker("b")
    seen = tokens(yard, "q")
    yard.pass_time(LEASE_S // 2)
    assert tokens(yard, "q") == seen
    # I expect the other to go on behind the last token once the lease is over.
    yard.pass_time(LEASE_S)
    yard.until(lambda: tokens(yard, "q") > seen)
    ledger = yard.connection.hgetall(yard.keys.ledger("anon", "q"))
    assert (ledger[b"worker"].split(b".")[0], ledger[b"attempt"]) == (b"b", b"2")


def test_a_silent_leader_is_replaced_when_its_lease_is_over(yard: TimedYard) -> None:
    yard.start_coordinator("two")
    yard.coordinators.pop("one")._connection.close()
    yard.pass_time(LEASE_S // 2)
    assert yard.connection.get(yard.keys.leader) == b"1:one"
    yard.pass_time(LEASE_S)
    assert yard.connection.get(yard.keys.leader) == b"2:two"
    yard.push([make_request("q", params=SamplingParams(max_tokens=3))])
    yard.until(lambda: state(yard, "q") == b"completed")


def test_the_requests_of_a_client_that_disappears_end_with_its_lease(yard: TimedYard) -> None:
    yard.scripts.submit("normal", [make_request("q", stream=True, params=LONG)], watched="anon")
    yard.until(lambda: state(yard, "q") == b"assigned")
    yard.pass_time(CLIENT_LEASE_MS // 2000)
    assert state(yard, "q") == b"assigned"
    yard.pass_time(CLIENT_LEASE_MS // 1000)
    yard.until(lambda: state(yard, "q") == b"cancelled")


def test_what_a_tenant_may_have_in_a_minute_it_may_have_in_the_next(yard: TimedYard) -> None:
    limits = TenantSettings(tokens_per_minute=100)
    yard.connection.hset(yard.keys.tenants, "acme", encode_tenant(limits))

    def submit(number: int) -> Submitted:
        params = SamplingParams(max_tokens=30)
        asked = make_request(f"q{number}", tokens=[1] * 10, tenant="acme", params=params)
        return yard.scripts.submit("normal", [asked])[0].code

    assert [submit(number) for number in range(3)] == [
        Submitted.ACCEPTED,
        Submitted.ACCEPTED,
        Submitted.QUOTA,
    ]
    yard.pass_time(20)
    assert submit(3) is Submitted.QUOTA
    yard.pass_time(100)
    assert submit(4) is Submitted.ACCEPTED


def test_a_result_is_kept_for_its_time(yard: TimedYard) -> None:
    yard.push([make_request("q", params=SamplingParams(max_tokens=1), result_ttl_s=60)])
    yard.until(lambda: state(yard, "q") == b"completed")
    yard.pass_time(30)
    assert state(yard, "q") == b"completed"
    yard.pass_time(31)
    assert state(yard, "q") is None
