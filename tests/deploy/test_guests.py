"""An untrusted user can do all that a client can, through its inbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from tests.contract.blocking import BlockingClient, Loop
from tests.deploy.conftest import GUESTS_YARD
from tests.deploy.day import Day
from tests.deploy.rights import denied
from tests.support.brokers import GuardedServer
from tests.support.fake_clock import faked
from tests.support.waiting import eventually
from tokenyard import (
    Cancellation,
    Client,
    DeadlineUnmeetable,
    IdReused,
    InvalidRequest,
    NoCoordinator,
    QueueFull,
    QuotaExceeded,
    SettingsError,
)
from tokenyard.cli import main

NewClient = Callable[..., Any]


class GuestDay(Day):
    """The yard that guests may use."""

    def __init__(self, server: GuardedServer) -> None:
        super().__init__(server, "default", GUESTS_YARD)

    def open(self, **options: object) -> None:
        self.coordinator(guests="guest,eve", **options)

    def command_as_default(self, *arguments: str) -> None:
        options = ["--redis-url", self.server.url_of("default"), "--yard", self.keys.yard]
        done = CliRunner().invoke(main, [*options, *arguments])
        assert done.exit_code == 0, done.output


@pytest.fixture
def day(emptied: GuardedServer) -> Iterator[GuestDay]:
    day = GuestDay(emptied)
    with day.plant:
        yield day


@pytest.fixture(params=["sync", "async"])
def new_client(request: pytest.FixtureRequest, day: GuestDay) -> Iterator[NewClient]:
    """A function that makes clients of one kind that log in as guests."""
    loop = Loop() if request.param == "async" else None
    made: list[Any] = []

    def make(user: str = "guest", name: str | None = None, **options: Any) -> Any:
        given: dict[str, Any] = {
            "client_id": name or f"{user}-1",
            "result_timeout_s": 60,
            **options,
        }
        url = day.server.url_of(user)
        client: Any = (
            BlockingClient(loop, url, yard=day.keys.yard, **given)
            if loop
            else Client(url, day.keys.yard, **given)
        )
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()
    if loop:
        loop.close()


def test_a_guest_can_do_all_that_a_client_can(day: GuestDay, new_client: NewClient) -> None:
    # Given a yard at work, and a guest
    day.open()
    day.worker("w", model_name="sim")
    day.plant.wait_for_workers(1)
    guest = new_client()
    # I expect it to see the models and not the workers,
    info = guest.info()
    assert info.is_guest
    assert info.models == ["sim"]
    assert info.workers == {}
    # to get whole and streamed answers,
    assert len(guest.submit([1, 2], max_tokens=5).result().tokens) == 5
    handle = guest.submit([1, 2], max_tokens=5, stream=True, id="streamed")
    assert handle.position == 0
    assert sum(len(delta.tokens) for delta in handle) == 5
    assert guest.status("streamed").is_over
    # also many at a time,
    results = dict(guest.map([[n + 1] for n in range(600)], window=300, max_tokens=1))
    assert len(results) == 600
    assert all(result.ok for result in results.values())
    # and under a known id the first answer, or a refusal.
    assert guest.submit([1, 2], max_tokens=5, stream=True, id="streamed").result().ok
    with pytest.raises(IdReused):
        guest.submit([1, 3], max_tokens=5, id="streamed")
    # Its inbox is empty, and the server refused it nothing.
    assert not day.plant.connection.exists(day.keys.inbox("guest"))
    guest.close()
    assert denied(day.server) == []


def test_a_guest_cancels_only_its_own_requests(day: GuestDay, new_client: NewClient) -> None:
    day.open()
    guest, other = new_client(), new_client("eve")
    waits = guest.submit([1], id="waits")
    assert guest.cancel("waits") is Cancellation.CANCELLED
    assert waits.wait().status == "cancelled"
    assert guest.cancel("waits") is Cancellation.OVER
    assert guest.cancel("later") is Cancellation.CANCELLED_BEFORE_ARRIVAL
    # The same id of another guest is another request.
    theirs = other.submit([1], id="theirs")
    assert guest.cancel("theirs") is Cancellation.CANCELLED_BEFORE_ARRIVAL
    assert other.status(theirs.id).state == "waiting"


def test_a_guest_may_begin_with_a_cancel(day: GuestDay, new_client: NewClient) -> None:
    day.open()
    assert new_client().cancel("later") is Cancellation.CANCELLED_BEFORE_ARRIVAL


def test_attached_requests_of_a_guest_that_leaves_are_cancelled(
    day: GuestDay, new_client: NewClient
) -> None:
    day.open()
    guest = new_client()
    guest.submit([1], id="attached", cancel_on_disconnect=True)
    assert day.plant.connection.smembers(day.keys.attached("guest-1")) == {b"attached"}
    guest.close()
    ledger = day.keys.ledger("guest-1", "attached")
    eventually(lambda: day.plant.connection.hget(ledger, "state") == b"cancelled")


def test_refused_requests_of_a_guest_raise_the_reason(day: GuestDay, new_client: NewClient) -> None:
    # Given a yard with room for two requests of guests
    day.open(max_num_queued_reqs=4)
    guest = new_client()
    for name in ("first", "second"):
        guest.submit([1], id=name)
    # I expect the third to be refused, and to be accepted once there is room,
    with pytest.raises(QueueFull):
        guest.submit([1], id="third")
    guest.cancel("first")
    assert guest.submit([1], id="third").id == "third"
    # a trusted client to find room throughout,
    with day.client() as client:
        client.submit([1], id="trusted")
    # and options that guests may not use to be refused.
    for option in ({"priority_class": "high"}, {"priority": -1}):
        with pytest.raises(InvalidRequest):
            guest.submit([1], **option)


def test_limits_of_a_guest_that_is_a_tenant_raise_the_reason(
    day: GuestDay, new_client: NewClient
) -> None:
    day.open()
    keys, keeper = day.keys, day.plant.connection
    keeper.hset(keys.tenants, "guest", '{"max_waiting_requests":1,"max_tokens":10}')
    guest = new_client()
    # A guest that names another tenant is still its own.
    guest.submit([1], id="first", max_tokens=5, tenant="eve")
    with pytest.raises(QuotaExceeded) as caught:
        guest.submit([1], max_tokens=5)
    assert caught.value.limit == "max_waiting_requests"
    assert caught.value.retry_after_s > 0
    with pytest.raises(QuotaExceeded) as caught:
        guest.submit([1], max_tokens=11)
    assert (caught.value.limit, caught.value.retry_after_s) == ("max_tokens", None)
    guest.cancel("first")
    assert guest.submit([1], id="second", max_tokens=5).id == "second"
    assert not keeper.exists(keys.tenant("eve"))
    # By hand, the refusal is a result.
    with redis.Redis.from_url(day.server.url_of("guest")) as connection:
        connection.xadd(keys.inbox("guest"), {"id": "third", "prompt": "x"})
        found: Any = connection.xread({keys.reply("guest", "third"): "0"}, block=60_000)
        assert b"QUOTA_EXCEEDED" in found[0][1][0][1][b"error"]
    # Nothing of this is refused by the server.
    guest.close()
    assert denied(day.server) == []


def test_a_guests_unmeetable_deadline_is_refused(day: GuestDay, new_client: NewClient) -> None:
    day.open()
    guest = new_client()
    guest.submit([1], id="first")
    day.plant.connection.hset(day.keys.info, "rate", "0.001")
    with pytest.raises(DeadlineUnmeetable):
        guest.submit([1], deadline_s=5, refuse_late=True)


def test_a_guest_without_a_leader_gets_no_coordinator(day: GuestDay, new_client: NewClient) -> None:
    day.open()
    guest, hasty = new_client(), new_client(connect_timeout_s=3600.0)
    hasty.info()
    day.plant.programs[0].kill()
    with faked(), pytest.raises(NoCoordinator):
        hasty.submit([1], id="kept")
    # The next leader accepts its entry once.
    day.plant.end_lead()
    day.open()
    ledger = day.keys.ledger("guest-1", "kept")
    eventually(lambda: day.plant.connection.hget(ledger, "state") == b"waiting")
    assert guest.submit([1], id="kept").id == "kept"
    assert day.plant.connection.xlen(day.keys.intake("normal")) == 1


def test_a_guest_with_a_foreign_client_id_is_refused(day: GuestDay, new_client: NewClient) -> None:
    day.open()
    with pytest.raises(SettingsError, match="guest-"):
        new_client(name="client-1").info()


def test_plain_entries_of_a_guest_are_refused_on_its_reply_stream(day: GuestDay) -> None:
    # Given a guest that writes plain entries
    day.open(max_num_queued_reqs=2)
    with redis.Redis.from_url(day.server.url_of("eve")) as eve:
        inbox = day.keys.inbox("eve")
        eve.xadd(inbox, {"id": "q1", "prompt": "Hello"})
        eve.xadd(inbox, {"id": "q2", "prompt": "Hello"})
        eve.xadd(inbox, {"id": "q3", "prompt": ""})

        def error(name: str) -> bytes:
            found: Any = eve.xread({day.keys.reply("eve", name): "0"}, block=60_000)
            return bytes(found[0][1][0][1][b"error"])

        # I expect each refusal as a result,
        assert b"QUEUE_FULL" in error("q2")
        assert b"INVALID_REQUEST" in error("q3")
        # and the accepted one to wait.
        assert day.plant.connection.hget(day.keys.ledger("eve", "q1"), "state") == b"waiting"
