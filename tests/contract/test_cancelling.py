"""Cancels by a client, with and without the right to make them itself."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from coordinator.recovery.cancels import CancelRequests
from coordinator.telemetry.counts import CoordinatorCounts
from tests.contract.conftest import WAIT_S, NewClient
from tests.contract.stand_in import StandIn
from tests.contract.turns import taking_turns
from tests.support.builders import random_name
from tests.support.fake_clock import FakeClock
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard import Cancellation, Code, QueueFull, RequestFailed, WaitTimeout
from tokenyard.broker.connection import connected
from tokenyard.client.core import ClientCore
from tokenyard.ops import requests
from tokenyard.ops.audit import COMMAND_LINE
from tokenyard.ops.names import request_name
from tokenyard.ops.operation import Caller, carry_out
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import unix_ms
from tokenyard.scripts import Scripts
from tokenyard.scripts import client as client_scripts
from tokenyard.scripts.calls import Call

RIGHTS = Path(__file__).parents[2] / "deploy/users.acl"


def expired(scripts: Scripts) -> list[bytes]:
    """The clients whose leases have expired."""
    told: Any = scripts.yard.connection.time()
    return scripts.watch_clients(10, now_ms=unix_ms(told))


Granting = Callable[[], None]


@pytest.fixture
def granting(scripts: Scripts) -> Granting:
    """A turn of a leader that only carries out requested cancels."""
    return partial(CancelRequests(scripts, CoordinatorCounts()).run_once, is_woken=True)


@pytest.fixture
def confined_url(broker: Server, connection: redis.Redis) -> Iterator[str]:
    """The broker for a user with only the rights of `client` in deploy/users.acl."""
    user = random_name("user")
    [line] = [one for one in RIGHTS.read_text().splitlines() if one.startswith("user client ")]
    rights = re.findall(r"\([^)]*\)|\S+", line.removeprefix("user client "))
    connection.execute_command("ACL", "SETUSER", user, "reset", *rights, ">secret")
    yield f"redis://{user}:secret@127.0.0.1:{broker.port}/0"
    connection.execute_command("ACL", "DELUSER", user)


@pytest.fixture
def confined(new_client_at: NewClient, confined_url: str) -> NewClient:
    """Makes clients of that user."""
    name = random_name("client")
    return lambda **options: new_client_at(confined_url, **{"client_id": name, **options})


@pytest.fixture(params=["by its own right", "by the coordinator"])
def cancelling(
    request: pytest.FixtureRequest, new_client: NewClient, confined: NewClient, granting: Granting
) -> Iterator[NewClient]:
    """Makes clients that cancel by themselves, or by a request to the leader."""
    if request.param == "by its own right":
        yield new_client
        return
    with taking_turns(granting):
        yield confined


class TestCancel:
    def test_cancel_of_a_waiting_request_has_its_result_immediately(
        self, yard: StandIn, cancelling: NewClient
    ) -> None:
        handle = cancelling().submit([1])
        assert handle.cancel() == Cancellation.CANCELLED
        with pytest.raises(RequestFailed) as caught:
            handle.result(WAIT_S)
        assert (caught.value.code, caught.value.result.status) == (Code.CANCELLED, "cancelled")
        assert yard.dispatch() == 0

    def test_cancel_of_a_running_request_keeps_its_published_tokens(
        self, yard: StandIn, cancelling: NewClient
    ) -> None:
        handle = cancelling().submit("go", stream=True)
        yard.dispatch()
        yard.emit(handle.id, [72, 101])
        deltas = iter(handle)
        assert next(deltas).text == "He"
        assert handle.cancel() == Cancellation.CANCELLED
        with pytest.raises(RequestFailed, match="CANCELLED"):
            list(deltas)
        assert handle.wait(WAIT_S).tokens == [72, 101]
        yard.dispatch()
        assert not yard.lane, "the worker was told"

    def test_an_ended_request_is_not_cancelled(self, yard: StandIn, cancelling: NewClient) -> None:
        client = cancelling()
        handle = client.submit([1])
        yard.answer_all()
        assert handle.result(WAIT_S).tokens == [2]
        assert handle.cancel() == Cancellation.OVER
        assert handle.wait().status == "completed"
        assert not yard.connection.exists(yard.keys.cancelling, yard.keys.cancels(client.client_id))

    def test_cancel_of_an_unknown_id_comes_before_its_arrival(
        self, yard: StandIn, cancelling: NewClient
    ) -> None:
        client = cancelling()
        assert client.cancel("later") == Cancellation.CANCELLED_BEFORE_ARRIVAL
        assert client.submit([1], id="later").wait(WAIT_S).status == "cancelled"
        assert yard.dispatch() == 0

    def test_cancel_needs_no_coordinator(self, new_client: NewClient) -> None:
        assert new_client(client_id="me").cancel("q") == Cancellation.CANCELLED_BEFORE_ARRIVAL

    def test_another_client_of_the_same_name_may_cancel(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client(client_id="me").submit([1])
        assert new_client(client_id="me").cancel(handle.id) == Cancellation.CANCELLED
        assert handle.wait(WAIT_S).status == "cancelled"

    def test_cancel_of_a_request_that_always_moves_times_out(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client(client_id="me").submit([1])
        ledger = yard.keys.ledger("me", handle.id)
        original, places = ClientCore.cancel, itertools.cycle(("high", "low"))

        def moving(core: ClientCore, request_id: str) -> Any:
            steps = original(core, request_id)
            answer = None
            try:
                while True:
                    step = steps.send(answer)
                    if isinstance(step, Call):
                        elsewhere = {"intake": next(places), "entry": "1-0"}
                        yard.connection.hset(ledger, mapping=elsewhere)
                    answer = yield step
            except StopIteration as end:
                return end.value

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClientCore, "cancel", moving)
            with pytest.raises(WaitTimeout, match="moved"):
                handle.cancel()
        yard.connection.hdel(ledger, "intake", "entry")
        assert handle.cancel() == Cancellation.CANCELLED


class TestCancelWithoutTheRight:
    """A client with only the rights of `client` in deploy/users.acl."""

    def test_cancel_of_a_request_that_ends_meanwhile_is_over(
        self, yard: StandIn, confined: NewClient, granting: Granting
    ) -> None:
        handle = confined().submit([1])
        with yard.running():
            assert handle.cancel() == Cancellation.OVER
        assert handle.wait(WAIT_S).tokens == [2]

    def test_its_user_cancels_at_the_command_line_too(
        self, yard: StandIn, confined: NewClient, confined_url: str, granting: Granting
    ) -> None:
        """Given the same user at the command line, I expect the leader to be asked there, too."""
        client = confined()
        handle = client.submit([1])
        with connected(confined_url) as own, taking_turns(granting):
            done = carry_out(
                Yard(own, yard.keys, confined_url),
                requests.cancel,
                Caller("kim@north", COMMAND_LINE),
                {"request": (request_name(client.client_id, handle.id),)},
            )
        assert done.outcome.fields["cancelled"] == 1
        assert handle.wait(WAIT_S).status == "cancelled"
        assert "permission" in done.unrecorded  # nor may it write the audit

    @pytest.mark.parametrize("stopped_s", [0.0, 1.0])
    def test_a_requested_cancel_stays_without_a_coordinator(
        self,
        yard: StandIn,
        confined: NewClient,
        granting: Granting,
        fake_clock: FakeClock,
        stopped_s: float,
    ) -> None:
        handle = confined(connect_timeout_s=0.3).submit([1])
        fake_clock.ticks_s = stopped_s
        with pytest.raises(WaitTimeout, match="no coordinator"):
            handle.cancel()
        fake_clock.ticks_s = 0.0

        granting()
        assert handle.wait(WAIT_S).status == "cancelled"

    def test_a_requested_cancel_is_repeated_after_the_leader_died(
        self,
        yard: StandIn,
        confined: NewClient,
        granting: Granting,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tokenyard.client.core._REPEAT_S", 0.05)
        client = confined()
        handle = client.submit([1])
        lost: list[int] = []

        def lose_and_grant() -> None:
            eventually(lambda: yard.connection.xlen(yard.keys.cancelling))
            lost.append(yard.connection.delete(yard.keys.cancelling))
            eventually(lambda: yard.connection.xlen(yard.keys.cancelling))
            granting()

        thread = threading.Thread(target=lose_and_grant)
        thread.start()
        assert handle.cancel() == Cancellation.CANCELLED
        thread.join(WAIT_S)
        assert lost == [1]

    def test_too_many_requested_cancels_are_refused(
        self,
        yard: StandIn,
        confined: NewClient,
        monkeypatch: pytest.MonkeyPatch,
        fake_clock: FakeClock,
    ) -> None:
        monkeypatch.setattr(client_scripts, "MOST_CANCELS", 1)
        client = confined(connect_timeout_s=0.3)
        for message in ("no coordinator", "too many"):
            with pytest.raises(WaitTimeout, match=message):
                client.submit([1]).cancel()

    def test_close_leaves_forbidden_cancels_to_the_coordinator(
        self, yard: StandIn, confined: NewClient, scripts: Scripts
    ) -> None:
        client = confined()
        client.submit_many([[1], [2]], cancel_on_disconnect=True)
        client.close()
        assert eventually(lambda: expired(scripts) == [client.client_id.encode()])


class TestCancelOnDisconnect:
    def test_close_cancels_only_requests_with_the_option(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        client = new_client(client_id="me")
        over = client.submit([1], cancel_on_disconnect=True)
        yard.answer_all()
        assert over.result(WAIT_S).tokens == [2]
        client.submit([1], id="stays")
        handle = client.submit([2], id="ends", cancel_on_disconnect=True)
        assert yard.connection.smembers(yard.keys.attached("me")) >= {b"ends"}
        client.close()
        with pytest.raises(WaitTimeout, match="cancelled with it"):
            handle.result()
        again = new_client(client_id="me")
        assert again.status("ends").state == "cancelled"
        assert again.status(over.id).state == "completed"
        assert again.status("stays").state == "waiting"
        assert not yard.connection.exists(yard.keys.attached("me"), yard.keys.clients)

    def test_close_leaves_cancels_beyond_its_limit_to_the_coordinator(
        self,
        yard: StandIn,
        new_client: NewClient,
        scripts: Scripts,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tokenyard.client.core._MAX_CANCELS", 2)
        client = new_client(client_id="me")
        client.submit_many([[1], [2], [3]], cancel_on_disconnect=True)
        client.close()
        assert yard.connection.scard(yard.keys.attached("me")) == 1
        assert eventually(lambda: expired(scripts) == [b"me"])

    def test_the_lease_is_renewed_while_a_request_runs(
        self, yard: StandIn, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tokenyard.client.state.RENEW_EVERY_S", 0.01)
        for block in ("BLOCK_MS", "IDLE_BLOCK_MS"):
            monkeypatch.setattr(f"tokenyard.client.core.{block}", 20)
        client = new_client(client_id="me")
        handle = client.submit([1], cancel_on_disconnect=True)
        first = yard.connection.zscore(yard.keys.clients, "me")
        assert eventually(lambda: yard.connection.zscore(yard.keys.clients, "me") != first)
        # This corrects a coordinator that had taken the client for gone.
        yard.connection.zrem(yard.keys.clients, "me")
        assert eventually(lambda: yard.connection.zscore(yard.keys.clients, "me"))
        yard.answer_all()
        assert handle.result(WAIT_S).tokens == [2]
        assert eventually(
            lambda: not yard.connection.exists(yard.keys.attached("me"), yard.keys.clients)
        )

    def test_an_earlier_request_is_attached_too(self, yard: StandIn, new_client: NewClient) -> None:
        new_client(client_id="me").submit([1], id="q")
        again = new_client(client_id="me")
        again.submit([1], id="q", cancel_on_disconnect=True)
        again.close()
        assert new_client(client_id="me").status("q").state == "cancelled"

    def test_a_refused_request_is_not_attached(self, yard: StandIn, new_client: NewClient) -> None:
        yard.tell(max_num_queued_reqs=1)
        client = new_client(client_id="me")
        with pytest.raises(QueueFull):
            client.submit_many([[1], {"prompt": [2], "id": "q"}], cancel_on_disconnect=True)
        client.close()
        assert not yard.connection.exists(yard.keys.ledger("me", "q"))
