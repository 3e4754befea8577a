"""A client's promises about its connection: handshake, close, and loss of the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from tests.contract.conftest import WAIT_S, NewClient
from tests.contract.stand_in import MODEL, StandIn, spell
from tests.support.brokers import ask
from tests.support.servers import Server, free_port
from tokenyard import (
    BrokerUnavailable,
    BrokerUnsuitable,
    Cancellation,
    NoCoordinator,
    ProtocolMismatch,
    SettingsError,
    TokenyardError,
    WaitTimeout,
)
from tokenyard.client.core import ClientCore
from tokenyard.client.operations import Delay, Steps
from tokenyard.protocol.keys import Keys


class TestHandshake:
    def test_client_reads_the_handshake(self, yard: StandIn, new_client: NewClient) -> None:
        info = new_client().info()
        assert (info.protocol, info.models, info.default_model) == (1, [MODEL], MODEL)
        assert (info.coordinator, info.max_request_bytes) == ("stand-in", 1024 * 1024)
        assert info.workers[yard.worker].model == MODEL

    def test_missing_coordinator_is_an_error_with_a_hint(
        self, new_client_at: NewClient, broker: Server, keys: Keys
    ) -> None:
        client = new_client_at(broker.url + "/0", connect_timeout_s=0.2)
        with pytest.raises(NoCoordinator) as caught:
            client.start()
        command = f"tokenyard --redis-url {broker.url}/0 --yard {keys.yard} coordinator"
        assert command in str(caught.value)

    def test_client_waits_for_a_coordinator(
        self, new_client: NewClient, connection: redis.Redis, keys: Keys
    ) -> None:
        client = new_client()
        late = threading.Timer(0.2, StandIn(connection, keys).open)
        late.start()
        client.start()
        late.join(WAIT_S)

    def test_client_refuses_another_protocol(self, yard: StandIn, new_client: NewClient) -> None:
        yard.tell(protocol=2)
        with pytest.raises(ProtocolMismatch, match="version 2"):
            new_client().start()

    def test_error_names_an_absent_server_without_its_password(
        self, new_client_at: NewClient
    ) -> None:
        url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
        with pytest.raises(BrokerUnavailable) as caught:
            new_client_at(url).start()
        assert "127.0.0.1" in str(caught.value)
        assert "secret" not in str(caught.value)

    def test_a_wrong_password_is_not_retried(
        self, new_client_at: NewClient, broker: Server
    ) -> None:
        with pytest.raises(BrokerUnsuitable) as caught:
            new_client_at(f"redis://nobody:secret@127.0.0.1:{broker.port}/0").start()
        assert "secret" not in str(caught.value)

    def test_an_invalid_url_is_refused_immediately(self, new_client_at: NewClient) -> None:
        with pytest.raises(SettingsError, match="redis"):
            new_client_at("http://localhost")

    def test_an_invalid_name_is_refused_immediately(self, new_client: NewClient) -> None:
        with pytest.raises(SettingsError, match="client_id"):
            new_client(client_id="a b")


class TestClosing:
    def test_close_is_idempotent(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client()
        client.close()
        client.close()
        started = new_client()
        started.submit([1])
        started.close()
        started.close()

    def test_close_ends_waits_with_an_error(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client()
        handle = client.submit([1])
        client.close()
        with pytest.raises(WaitTimeout, match="closed"):
            handle.result(WAIT_S)

    @pytest.mark.parametrize("was_used", [False, True])
    def test_a_closed_client_accepts_no_call(
        self, yard: StandIn, new_client: NewClient, was_used: bool
    ) -> None:
        client = new_client()
        if was_used:
            client.submit([1])
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.submit([1])


@pytest.fixture
def own_yard(own_broker: Server, keys: Keys) -> Iterator[StandIn]:
    """A yard on a server that the test may stop."""
    with StandIn.at(own_broker.url, keys) as yard:
        yield yard


class TestServerWithoutMemory:
    def test_server_without_memory_refuses_new_requests_and_returns_results(
        self, new_client_at: NewClient, own_broker: Server, own_yard: StandIn
    ) -> None:
        first = new_client_at(own_broker.url, client_id="me")
        first.submit([1], id="over")
        own_yard.answer_all()
        running = first.submit([2], id="running")
        ask(own_broker, "CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(BrokerUnavailable, match="full"):
            first.submit([3])
        assert running.cancel() == Cancellation.CANCELLED
        assert running.wait(WAIT_S).status == "cancelled"
        again = new_client_at(own_broker.url, client_id="me")
        assert again.attach("over").result(WAIT_S).tokens == [2]
        assert again.status("running").state == "cancelled"
        ask(own_broker, "CONFIG", "SET", "maxmemory", 0)


class TestServerGoesAway:
    def test_handles_survive_a_restart(
        self, new_client_at: NewClient, own_broker: Server, own_yard: StandIn
    ) -> None:
        handle = new_client_at(own_broker.url).submit("go", stream=True)
        own_yard.dispatch()
        own_yard.emit(handle.id, [72])
        deltas = iter(handle)
        assert next(deltas).text == "H"
        own_broker.kill()
        own_broker.start()
        own_yard.emit(handle.id, [105])
        own_yard.finish(handle.id)
        assert [delta.text for delta in deltas] == ["i"]
        assert handle.result(WAIT_S).text == spell([72, 105])


class TestListener:
    def test_one_that_fails_says_why_and_is_replaced(
        self, yard: StandIn, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_submitted = threading.Event()

        def listen(_: ClientCore) -> Steps[None]:
            while not is_submitted.is_set():
                yield Delay(0.01)
            raise LookupError("what nobody expects")

        client = new_client()
        with monkeypatch.context() as patch:
            patch.setattr(ClientCore, "listen", listen)
            handle = client.submit([1])
            is_submitted.set()
            with pytest.raises(TokenyardError, match="what nobody expects"):
                handle.result(WAIT_S)

        with yard.running():
            assert client.submit([5]).result(WAIT_S).tokens == [6]
