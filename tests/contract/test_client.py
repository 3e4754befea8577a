"""What a client promises, kept by both of them, on both servers."""

from __future__ import annotations

import datetime
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from coordinator.wishes import Wishes
from tests.contract.blocking import BlockingClient, Loop
from tests.contract.stand_in import MODEL, StandIn, spell
from tests.support.builders import random_name
from tests.support.servers import Server, free_port
from tests.support.waiting import eventually
from tokenyard import (
    BrokerUnavailable,
    BrokerUnsuitable,
    Cancellation,
    Client,
    Code,
    DeadlineUnmeetable,
    InvalidRequest,
    NoCoordinator,
    ProtocolMismatch,
    QueueFull,
    RequestFailed,
    SamplingParams,
    SettingsError,
    UnknownRequest,
    WaitTimeout,
)
from tokenyard.dialogue import Dialogue
from tokenyard.keys import Keys
from tokenyard.replies import encode_reply
from tokenyard.scripts import Call, Scripts
from tokenyard.scripts import client as client_scripts
from tokenyard.wire import pack_tokens, unpack_tokens

NewClient = Callable[..., Any]
WAIT_S = 20.0


@pytest.fixture(params=["sync", "async"])
def new_client_at(request: pytest.FixtureRequest, keys: Keys) -> Iterator[NewClient]:
    """Makes clients of one kind for a URL, and closes them after the test."""
    loop = Loop() if request.param == "async" else None
    clients: list[Any] = []

    def make(url: str, **options: Any) -> Any:
        options = {"yard": keys.yard, "connect_timeout_s": 5, "result_timeout_s": WAIT_S} | options
        client = BlockingClient(loop, url, **options) if loop else Client(url, **options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
    if loop:
        loop.close()


@pytest.fixture
def new_client(new_client_at: NewClient, redis_url: str) -> NewClient:
    """The same, for the test's server."""
    return lambda **options: new_client_at(redis_url, **options)


@pytest.fixture
def yard(connection: redis.Redis, scripts: Scripts) -> StandIn:
    """The test's yard with somebody in it."""
    stand_in = StandIn(connection, scripts)
    stand_in.open()
    return stand_in


class Letters:
    """A tokenizer: one token for each UTF-8 byte; 0 is special and ends a prompt."""

    def encode(self, texts: Any) -> list[list[int]]:
        return [[*text.encode(), 0] for text in texts]

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode([messages[-1]["content"]])[0]

    def decode(self, tokens: Any, *, skip_special_tokens: bool) -> str:
        shown = [token for token in tokens if token or not skip_special_tokens]
        return bytes(shown).decode(errors="replace")


class TestHandshake:
    def test_learns_the_yard(self, yard: StandIn, new_client: NewClient) -> None:
        info = new_client().info()
        assert (info.protocol, info.models, info.default_model) == (1, [MODEL], MODEL)
        assert (info.coordinator, info.max_request_bytes) == ("stand-in", 1024 * 1024)
        assert info.workers[yard.worker].model == MODEL
        assert abs(info.clock_offset_s) < 5

    def test_says_how_to_start_a_coordinator(
        self, new_client_at: NewClient, broker: Server, keys: Keys
    ) -> None:
        client = new_client_at(broker.url + "/0", connect_timeout_s=0.2)
        with pytest.raises(NoCoordinator) as caught:
            client.start()
        command = f"tokenyard --redis-url {broker.url}/0 --yard {keys.yard} coordinator"
        assert command in str(caught.value)

    def test_waits_for_a_coordinator(
        self, new_client: NewClient, connection: redis.Redis, scripts: Scripts
    ) -> None:
        client = new_client()
        late = threading.Timer(0.2, StandIn(connection, scripts).open)
        late.start()
        client.start()
        late.join(10)

    def test_refuses_another_protocol(
        self, new_client: NewClient, connection: redis.Redis, scripts: Scripts
    ) -> None:
        StandIn(connection, scripts).open(protocol=2)
        with pytest.raises(ProtocolMismatch, match="version 2"):
            new_client().start()

    def test_names_an_absent_server_without_its_password(self, new_client_at: NewClient) -> None:
        url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
        with pytest.raises(BrokerUnavailable) as caught:
            new_client_at(url).start()
        assert "127.0.0.1" in str(caught.value)
        assert "secret" not in str(caught.value)

    def test_a_wrong_password_is_no_matter_of_trying_again(
        self, new_client_at: NewClient, broker: Server
    ) -> None:
        with pytest.raises((BrokerUnsuitable, BrokerUnavailable)) as caught:
            new_client_at(f"redis://nobody:secret@127.0.0.1:{broker.port}/0").start()
        assert isinstance(caught.value, BrokerUnsuitable)
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize(
        "url", ["http://localhost", "redis://localhost:port", "localhost:6379"]
    )
    def test_a_bad_url_is_refused_at_once(self, new_client_at: NewClient, url: str) -> None:
        with pytest.raises(SettingsError, match="redis"):
            new_client_at(url)

    def test_a_bad_name_is_refused_at_once(self, new_client: NewClient) -> None:
        with pytest.raises(SettingsError, match="client_id"):
            new_client(client_id="a b")


class TestSubmit:
    def test_token_ids_go_out_and_come_back(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit([1, 2, 3], max_tokens=4, temperature=0)
        yard.dispatch()
        [request] = yard.seen
        assert unpack_tokens(request.tokens or b"") == [1, 2, 3]
        assert request.params == SamplingParams(max_tokens=4, temperature=0)
        yard.finish(handle.id, [7, 8], finish_reason="stop")
        result = handle.result(WAIT_S)
        assert (result.id, result.status, result.tokens) == (handle.id, "completed", [7, 8])
        assert (result.text, result.finish_reason) == (None, "stop")

    def test_text_goes_to_the_worker_as_text(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit("HAL")
        yard.answer_all()
        assert yard.seen[0].prompt == "HAL"
        assert handle.result(WAIT_S).text == "IBM"

    def test_messages_go_to_the_worker_as_messages(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        messages = [{"role": "user", "content": "HAL"}]
        handle = new_client().submit(messages)
        yard.answer_all()
        assert yard.seen[0].messages == messages
        assert handle.result(WAIT_S).text == "IBM"

    def test_options_reach_the_worker(self, yard: StandIn, new_client: NewClient) -> None:
        deadline = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
        new_client(client_id="tester").submit(
            [1],
            id="mine",
            model=MODEL,
            params={"top_p": 0.5},
            seed=7,
            stop=["x"],
            priority_class="low",
            priority=3,
            deadline=deadline,
            result_ttl_s=60,
            tenant="t",
            session="s",
            metadata={"traceparent": "00-1"},
        )
        yard.dispatch()
        [request] = yard.seen
        assert (request.id, request.client, request.model) == ("mine", "tester", MODEL)
        assert request.params == SamplingParams(top_p=0.5, seed=7, stop=["x"])
        assert (request.priority, request.deadline_ms) == (3, 4102444800000)
        assert (request.result_ttl_s, request.tenant, request.session) == (60, "t", "s")
        assert request.metadata == {"traceparent": "00-1"}
        assert yard.lane["mine"].sid.startswith("low/")

    def test_failure_is_raised_or_given_back(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit([1])
        yard.dispatch()
        yard.fail(handle.id, "INFERENCE_ERROR", "it broke")
        with pytest.raises(RequestFailed, match="INFERENCE_ERROR: it broke") as caught:
            handle.result(WAIT_S)
        assert caught.value.code == "INFERENCE_ERROR"
        result = handle.wait(WAIT_S)
        assert result == caught.value.result
        assert (result.ok, result.status) == (False, "failed")

    def test_waiting_is_bounded(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client(result_timeout_s=0.05).submit([1])
        with pytest.raises(WaitTimeout):
            handle.result()
        with pytest.raises(TimeoutError):
            handle.wait(0.01)
        with pytest.raises(WaitTimeout):
            list(handle)
        yard.answer_all()
        assert handle.result(math.inf).tokens == [2]

    @pytest.mark.parametrize(
        ("prompt", "options", "field"),
        [
            ("", {}, "prompt"),
            ([], {}, "tokens"),
            ([-1], {}, "tokens"),
            ([2**31], {}, "tokens"),
            ([1.5], {}, "tokens"),
            (b"ab", {}, "prompt"),
            (7, {}, "prompt"),
            ({"prompt": "x"}, {}, "prompt"),
            ([{"content": "x"}], {}, "messages[0].role"),
            ("x", {"temperature": -1}, "params.temperature"),
            ("x", {"temprature": 1}, "params.temprature"),
            ("x", {"structured_outputs": {"jsn": "{}"}}, "params.structured_outputs.jsn"),
            ("x", {"refuse_late": True}, "refuse_late"),
            ("x", {"max_tokens": 1, "min_tokens": 2}, "params.min_tokens"),
            ("x", {"id": "x" * 201}, "id"),
            ("x", {"id": ""}, "id"),
            ("x", {"priority_class": "urgent"}, "priority_class"),
            ("x", {"priority": 2**40}, "priority"),
            ("x", {"result_ttl_s": 0}, "result_ttl"),
            ("x", {"deadline": 5}, "deadline"),
            ("x", {"deadline_s": "soon"}, "deadline_s"),
            ("x", {"metadata": {"x": object()}}, "metadata"),
            ("x" * 2_000_000, {}, "prompt"),
        ],
    )
    def test_what_is_wrong_is_said_at_once(
        self, yard: StandIn, new_client: NewClient, prompt: Any, options: Any, field: str
    ) -> None:
        with pytest.raises(InvalidRequest) as caught:
            new_client().submit(prompt, **options)
        assert caught.value.field == field
        assert yard.dispatch() == 0

    def test_a_full_queue_is_said_at_once(
        self, connection: redis.Redis, scripts: Scripts, new_client: NewClient
    ) -> None:
        yard = StandIn(connection, scripts)
        yard.open(max_num_queued_reqs=2)
        client = new_client()
        with pytest.raises(QueueFull) as caught:
            client.submit_many([[1], [2], [3]])
        assert caught.value.retry_after_s > 0
        with pytest.raises(QueueFull):
            client.submit([4])
        yard.answer_all()
        assert [each.result(WAIT_S).tokens for each in caught.value.accepted] == [[2], [3]]

    def test_an_id_runs_once(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client()
        first, again = client.submit([1], id="q"), client.submit([1], id="q")
        assert yard.answer_all() == 1
        assert first.result(WAIT_S) == again.result(WAIT_S)
        assert client.submit([1], id="q").result(WAIT_S) == first.result()
        assert yard.answer_all() == 0

    def test_status_follows_the_ledger(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit([1], stream=True)
        assert handle.status().state == "waiting"
        yard.dispatch()
        yard.emit(handle.id, [5, 6])
        status = handle.status()
        assert (status.state, status.worker, status.attempt) == ("assigned", yard.worker, 1)
        assert (status.tokens_published, status.is_over) == (2, False)
        yard.finish(handle.id)
        assert handle.status().is_over


class TestMany:
    def test_a_burst_gets_its_answers(self, yard: StandIn, new_client: NewClient) -> None:
        items = [[1], {"prompt": [2], "id": "two", "priority_class": "high"}, [3]]
        handles = new_client().submit_many(items, max_tokens=2)
        yard.answer_all()
        assert [handle.result(WAIT_S).tokens for handle in handles] == [[2], [3], [4]]
        assert handles[1].id == "two"
        assert {request.params.max_tokens for request in yard.seen} == {2}

    def test_a_burst_with_a_bad_item_is_not_sent(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        with pytest.raises(InvalidRequest) as caught:
            new_client().submit_many([[1], [-1]])
        assert caught.value.field == "items[1].tokens"
        assert yard.dispatch() == 0

    def test_many_threads_share_a_client(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client()
        client.start()
        answers: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            for turn in range(10):
                handle = client.submit([number, turn], stream=bool(turn % 2))
                tokens = [token for delta in handle for token in delta.tokens]
                assert tokens == [number + 1, turn + 1] == handle.result().tokens
            answers[number] = tokens

        threads = [threading.Thread(target=ask, args=[number]) for number in range(8)]
        with yard.running():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
        assert sorted(answers) == list(range(8))

    def test_a_burst_larger_than_a_call(self, yard: StandIn, new_client: NewClient) -> None:
        handles = new_client().submit_many([[number] for number in range(1, 1001)])
        yard.answer_all()
        answers = [handle.result(WAIT_S).tokens for handle in handles]
        assert answers == [[number + 1] for number in range(1, 1001)]


class TestMap:
    @pytest.mark.parametrize("ordered", [False, True])
    def test_every_prompt_gets_its_answer(
        self, yard: StandIn, new_client: NewClient, ordered: bool
    ) -> None:
        prompts = ([number] for number in range(1, 501))
        with yard.running():
            answers = list(new_client().map(prompts, window=50, ordered=ordered))
        if ordered:
            assert [index for index, _ in answers] == list(range(500))
        assert {index: result.tokens for index, result in answers} == {
            index: [index + 2] for index in range(500)
        }

    def test_the_window_bounds_what_is_pulled(self, yard: StandIn, new_client: NewClient) -> None:
        pulled = itertools.count(1)
        given_back = 0
        furthest = 0

        def prompts() -> Iterator[list[int]]:
            nonlocal furthest
            for number in itertools.islice(pulled, 100):
                furthest = max(furthest, number - given_back)
                yield [number]

        with yard.running():
            for _ in new_client().map(prompts(), window=10, ordered=True):
                given_back += 1
        assert given_back == 100
        assert furthest <= 11  # the window, and the result in our hands

    def test_a_bad_prompt_has_its_result(self, yard: StandIn, new_client: NewClient) -> None:
        with yard.running():
            answers = dict(new_client().map([[1], "", [3]]))
        assert answers[1].error.code == "INVALID_REQUEST"
        assert (answers[0].tokens, answers[2].tokens) == ([2], [4])

    def test_a_full_queue_is_waited_for(
        self, connection: redis.Redis, scripts: Scripts, new_client: NewClient
    ) -> None:
        yard = StandIn(connection, scripts)
        yard.open(max_num_queued_reqs=4)
        with yard.running():
            answers = list(new_client().map([[number] for number in range(1, 21)]))
        assert sorted(result.tokens[0] for _, result in answers) == list(range(2, 22))

    def test_one_id_twice(self, yard: StandIn, new_client: NewClient) -> None:
        items = [{"prompt": [1], "id": "same"}, {"prompt": [1], "id": "same"}]
        with yard.running():
            answers = dict(new_client().map(items))
        assert answers[0] == answers[1]
        assert len(yard.seen) == 1

    def test_no_prompts(self, yard: StandIn, new_client: NewClient) -> None:
        assert list(new_client().map([])) == []

    def test_leaving_early(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client()
        with yard.running():
            answers = client.map(itertools.repeat([1]), window=5)
            assert next(answers)[1].tokens == [2]
            answers.close()
            assert client.submit([5]).result(WAIT_S).tokens == [6]

    def test_gives_up_when_nothing_moves(self, yard: StandIn, new_client: NewClient) -> None:
        with pytest.raises(WaitTimeout):
            list(new_client(result_timeout_s=0.1).map([[1]]))


class TestStream:
    def test_all_deltas_are_the_reply(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit("go", stream=True)
        yard.dispatch()
        yard.emit(handle.id, [72, 101])
        deltas = iter(handle)
        first = next(deltas)
        assert (first.seq, first.tokens, first.text) == (0, [72, 101], "He")
        yard.emit(handle.id, [108])
        yard.finish(handle.id, [108, 111])
        rest = list(deltas)
        assert [(delta.seq, delta.text) for delta in rest] == [(2, "l"), (3, "lo")]
        assert [delta.text for delta in handle] == ["He", "l", "lo"], "it can be read again"
        assert handle.result().text == "Hello"

    def test_a_request_that_does_not_stream_has_one(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client().submit([1, 2])
        yard.answer_all()
        [delta] = list(handle)
        assert (delta.seq, delta.tokens, delta.text) == (0, [2, 3], None)

    def test_failure_is_raised_after_the_last_delta(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client().submit("go", stream=True)
        yard.dispatch()
        yard.emit(handle.id, [72])
        yard.fail(handle.id, "WORKER_LOST", "gone")
        deltas = iter(handle)
        assert next(deltas).text == "H"
        with pytest.raises(RequestFailed, match="WORKER_LOST"):
            next(deltas)

    def test_replies_of_many_arrive_where_they_belong(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handles = new_client().submit_many([[number] * 3 for number in range(1, 51)], stream=True)
        with yard.running():
            for number, handle in enumerate(handles, start=1):
                assert [token for delta in handle for token in delta.tokens] == [number + 1] * 3


class TestLocalTokenizer:
    def test_text_is_tokenized_here_and_detokenized_here(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client(tokenizer=Letters()).submit("hi")
        yard.dispatch()
        assert unpack_tokens(yard.seen[0].tokens or b"") == [104, 105, 0]
        assert yard.seen[0].params.detokenize is False
        yard.finish(handle.id, list("Grüße".encode()))
        assert handle.result(WAIT_S).text == "Grüße"

    def test_messages_too(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client(tokenizer=Letters()).submit([{"role": "user", "content": "hi"}])
        yard.dispatch()
        assert unpack_tokens(yard.seen[0].tokens or b"") == [104, 105, 0]
        yard.finish(handle.id, [79, 75])
        assert handle.result(WAIT_S).text == "OK"

    def test_pieces_break_inside_characters(self, yard: StandIn, new_client: NewClient) -> None:
        text = "Grüße 👋!"
        handle = new_client(tokenizer=Letters()).submit("hi", stream=True)
        yard.dispatch()
        *first, last = text.encode()
        for token in first:
            yard.emit(handle.id, [token])
        yard.finish(handle.id, [last])
        deltas = list(handle)
        assert "".join(delta.text or "" for delta in deltas) == text == handle.result().text
        assert [token for delta in deltas for token in delta.tokens] == list(text.encode())
        assert not any("\ufffd" in (delta.text or "") for delta in deltas)

    def test_a_reply_cut_inside_a_character(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client(tokenizer=Letters()).submit("hi", stream=True)
        yard.dispatch()
        yard.emit(handle.id, [65, 0xC3])
        yard.finish(handle.id)
        text = "".join(delta.text or "" for delta in handle)
        assert text == "A\ufffd" == handle.result().text

    def test_stop_strings_leave_the_text_to_the_worker(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client(tokenizer=Letters()).submit("hi", stop=["x"], stream=True)
        yard.dispatch()
        assert yard.seen[0].wants_text
        yard.emit(handle.id, [65], text="")
        yard.finish(handle.id, [66], text="A")
        assert "".join(delta.text or "" for delta in handle) == "A" == handle.result().text

    def test_token_ids_in_give_token_ids_out(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client(tokenizer=Letters())
        plain, with_text = client.submit([1]), client.submit([1], detokenize=True)
        yard.dispatch()
        yard.finish(plain.id, [65])
        yard.finish(with_text.id, [65])
        assert (plain.result(WAIT_S).text, with_text.result(WAIT_S).text) == (None, "A")


class TestComingBack:
    def test_attach_gives_the_result(self, yard: StandIn, new_client: NewClient) -> None:
        new_client(client_id="me").submit([1], id="q")
        yard.answer_all()
        assert new_client(client_id="me").attach("q").result(WAIT_S).tokens == [2]

    def test_attach_continues_a_stream(self, yard: StandIn, new_client: NewClient) -> None:
        first = new_client(client_id="me")
        before = iter(first.submit("go", id="q", stream=True))
        yard.dispatch()
        yard.emit("q", [72, 101])
        assert next(before).text == "He"
        first.close()
        yard.emit("q", [108])
        handle = new_client(client_id="me").attach("q")
        deltas = iter(handle)
        assert next(deltas).tokens[:2] == [72, 101]
        yard.emit("q", [108])
        yard.finish("q", [111])
        list(deltas)
        assert [token for delta in handle for token in delta.tokens] == list(b"Hello")
        assert "".join(delta.text or "" for delta in handle) == "Hello"

    def test_attach_reads_what_the_stream_still_has(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        first = new_client(client_id="me")
        first.submit_many([{"prompt": "go", "id": name} for name in "ab"], stream=True)
        first.close()
        yard.dispatch()
        for letters in ("H", "e"):
            yard.emit("a", [ord(letters)])
            yard.emit("b", [ord(letters)])
        again = new_client(client_id="me")
        for name in "ab":
            deltas = iter(again.attach(name))
            assert [next(deltas).text, next(deltas).text] == ["H", "e"]
            yard.finish(name)
            assert list(deltas) == []

    def test_attach_to_a_stranger(self, yard: StandIn, new_client: NewClient) -> None:
        with pytest.raises(UnknownRequest, match="'q'"):
            new_client().attach("q")

    def test_replies_that_were_read_are_deleted(
        self, yard: StandIn, new_client: NewClient, connection: redis.Redis, keys: Keys
    ) -> None:
        client = new_client(client_id="me")
        with yard.running():
            for handle in client.submit_many([[1], [2], [3]]):
                handle.result(WAIT_S)
        assert eventually(lambda: connection.xlen(keys.replies("me")) == 0)

    def test_replies_that_were_trimmed_come_from_the_ledger(
        self, yard: StandIn, new_client: NewClient, connection: redis.Redis, keys: Keys
    ) -> None:
        handle = new_client(client_id="me").submit("go", stream=True)
        yard.dispatch()
        # The first delta reaches the ledger alone: as if it had been trimmed from the stream.
        connection.append(keys.tokens("me", handle.id), pack_tokens([72]))
        yard._published[handle.id] = [72]
        yard.emit(handle.id, [101])
        deltas = iter(handle)
        assert next(deltas).tokens == [72, 101]
        yard.finish(handle.id, [33], text="He!")
        assert "".join(delta.text or "" for delta in handle) == "He!"

    def test_a_result_that_never_came_is_looked_up(
        self,
        yard: StandIn,
        new_client: NewClient,
        connection: redis.Redis,
        keys: Keys,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tokenyard.session.CHECK_AFTER_S", 0.05)
        monkeypatch.setattr("tokenyard.session.CHECK_EVERY_S", 0.05)
        client = new_client(client_id="me")
        handle = client.submit([1])
        yard.dispatch()
        # What is lost is the reply; the ledger has the result.
        result = yard._result(handle.id, [9])
        found = {"state": "completed", "result": encode_reply(result.reply)}
        connection.hset(keys.ledger("me", handle.id), mapping=found)
        assert handle.result(WAIT_S).tokens == [9]

    def test_a_request_that_the_yard_forgot(
        self,
        yard: StandIn,
        new_client: NewClient,
        connection: redis.Redis,
        keys: Keys,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tokenyard.session.CHECK_AFTER_S", 0.05)
        monkeypatch.setattr("tokenyard.session.CHECK_EVERY_S", 0.05)
        handle = new_client(client_id="me").submit([1])
        connection.delete(keys.ledger("me", handle.id))
        with pytest.raises(UnknownRequest):
            handle.result(WAIT_S)

    def test_hostile_replies_are_skipped(
        self, yard: StandIn, new_client: NewClient, connection: redis.Redis, keys: Keys
    ) -> None:
        handle = new_client(client_id="me").submit([1])
        for fields in ({"frame": b"\xff"}, {"frame": b"\x91\x01"}, {"id": b"\xff"}, {"x": "y"}):
            connection.xadd(keys.replies("me"), fields)
        yard.answer_all()
        assert handle.result(WAIT_S).tokens == [2]


class TestClosing:
    def test_closing_is_idempotent(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client()
        client.close()
        client.close()
        started = new_client()
        started.submit([1])
        started.close()
        started.close()

    def test_whoever_waits_is_told(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client()
        handle = client.submit([1])
        client.close()
        with pytest.raises(WaitTimeout, match="closed"):
            handle.result(WAIT_S)

    @pytest.mark.parametrize("was_used", [False, True])
    def test_a_closed_client_takes_nothing(
        self, yard: StandIn, new_client: NewClient, was_used: bool
    ) -> None:
        client = new_client()
        if was_used:
            client.submit([1])
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.submit([1])


class TestCancel:
    def test_what_waits_has_its_result_at_once(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit([1])
        assert handle.cancel() == Cancellation.CANCELLED
        with pytest.raises(RequestFailed) as caught:
            handle.result(WAIT_S)
        assert (caught.value.code, caught.value.result.status) == (Code.CANCELLED, "cancelled")
        assert yard.dispatch() == 0

    def test_what_runs_keeps_the_tokens_that_were_shown(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client().submit("go", stream=True)
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

    def test_what_is_over_stays_as_it_is(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit([1])
        yard.answer_all()
        assert handle.result(WAIT_S).tokens == [2]
        assert handle.cancel() == Cancellation.OVER
        assert handle.wait().status == "completed"

    def test_twice_is_once(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit([1])
        assert [handle.cancel(), handle.cancel()] == [Cancellation.CANCELLED, Cancellation.OVER]

    def test_what_has_not_come_yet_is_forestalled(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        client = new_client()
        assert client.cancel("later") == Cancellation.FORESTALLED
        assert client.submit([1], id="later").wait(WAIT_S).status == "cancelled"
        assert yard.dispatch() == 0

    def test_needs_no_coordinator(self, new_client: NewClient) -> None:
        assert new_client(client_id="me").cancel("q") == Cancellation.FORESTALLED

    def test_another_client_of_that_name_may_cancel(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client(client_id="me").submit([1])
        assert new_client(client_id="me").cancel(handle.id) == Cancellation.CANCELLED
        assert handle.wait(WAIT_S).status == "cancelled"

    def test_what_moves_all_the_time_is_given_up(
        self, yard: StandIn, new_client: NewClient, connection: redis.Redis, keys: Keys
    ) -> None:
        handle = new_client(client_id="me").submit([1])
        ledger = keys.ledger("me", handle.id)
        original = Dialogue.cancel

        def moving(dialogue: Dialogue, request_id: str) -> Any:
            steps = original(dialogue, request_id)
            answer = None
            try:
                while True:
                    step = steps.send(answer)
                    if isinstance(step, Call):
                        connection.hset(ledger, "intake", f"elsewhere-{random_name('x')}")
                    answer = yield step
            except StopIteration as end:
                return end.value

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Dialogue, "cancel", moving)
            with pytest.raises(WaitTimeout, match="moved"):
                handle.cancel()
        connection.hset(ledger, "intake", "normal")
        assert handle.cancel() == Cancellation.CANCELLED


RIGHTS = Path(__file__).parents[2] / "deploy/users.acl"


class Granting:
    """A leader of which there is nothing but that it grants wishes."""

    def __init__(self, connection: redis.Redis, scripts: Scripts) -> None:
        self.wishes = Wishes(connection, scripts, scripts.keys)

    def once(self) -> None:
        self.wishes.run_once(is_woken=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In a thread of its own, until the block ends."""
        ends = threading.Event()

        def run() -> None:
            while not ends.wait(0.002):
                self.once()

        thread = threading.Thread(target=run, name="granting")
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join(10)


@pytest.fixture
def granting(connection: redis.Redis, scripts: Scripts) -> Granting:
    return Granting(connection, scripts)


class TestCancelWithoutTheRight:
    """A client that has the rights of `client` in deploy/users.acl, and no others."""

    @pytest.fixture
    def confined(
        self, new_client_at: NewClient, broker: Server, connection: redis.Redis
    ) -> Iterator[NewClient]:
        user, name = random_name("user"), random_name("client")
        [line] = [one for one in RIGHTS.read_text().splitlines() if one.startswith("user client ")]
        rights = re.findall(r"\([^)]*\)|\S+", line.removeprefix("user client "))
        connection.execute_command("ACL", "SETUSER", user, "reset", *rights, ">secret")
        url = f"redis://{user}:secret@127.0.0.1:{broker.port}/0"
        yield lambda **options: new_client_at(url, **{"client_id": name, **options})
        connection.execute_command("ACL", "DELUSER", user)

    def test_what_waits_is_cancelled_soon(
        self, yard: StandIn, confined: NewClient, granting: Granting
    ) -> None:
        handle = confined().submit([1])
        with granting.running():
            assert handle.cancel() == Cancellation.CANCELLED
        with pytest.raises(RequestFailed) as caught:
            handle.result(WAIT_S)
        assert (caught.value.code, caught.value.result.status) == (Code.CANCELLED, "cancelled")
        assert yard.dispatch() == 0

    def test_what_runs_keeps_the_tokens_that_were_shown(
        self, yard: StandIn, confined: NewClient, granting: Granting
    ) -> None:
        handle = confined().submit("go", stream=True)
        yard.dispatch()
        yard.emit(handle.id, [72, 101])
        assert next(iter(handle)).text == "He"
        with granting.running():
            assert handle.cancel() == Cancellation.CANCELLED
        assert handle.wait(WAIT_S).tokens == [72, 101]
        yard.dispatch()
        assert not yard.lane, "the worker was told"

    def test_what_is_over_is_so_at_once(
        self, yard: StandIn, confined: NewClient, connection: redis.Redis, keys: Keys
    ) -> None:
        client = confined()
        handle = client.submit([1])
        yard.answer_all()
        assert handle.result(WAIT_S).tokens == [2]
        assert handle.cancel() == Cancellation.OVER
        assert not connection.exists(keys.wishers, keys.wishes(client.client_id))

    def test_what_ends_meanwhile_is_over(
        self, yard: StandIn, confined: NewClient, granting: Granting
    ) -> None:
        handle = confined().submit([1])
        with yard.running():
            assert handle.cancel() == Cancellation.OVER
        assert handle.wait(WAIT_S).tokens == [2]

    def test_what_has_not_come_yet_is_forestalled(
        self, yard: StandIn, confined: NewClient, granting: Granting
    ) -> None:
        client = confined()
        with granting.running():
            assert client.cancel("later") == Cancellation.FORESTALLED
        assert client.submit([1], id="later").wait(WAIT_S).status == "cancelled"
        assert yard.dispatch() == 0

    def test_without_a_coordinator_the_wish_stands(
        self, yard: StandIn, confined: NewClient, granting: Granting
    ) -> None:
        handle = confined(connect_timeout_s=0.3).submit([1])
        with pytest.raises(WaitTimeout, match="no coordinator"):
            handle.cancel()

        granting.once()
        assert handle.wait(WAIT_S).status == "cancelled"

    def test_a_leader_that_was_told_and_died_is_made_up_for(
        self,
        yard: StandIn,
        confined: NewClient,
        granting: Granting,
        connection: redis.Redis,
        keys: Keys,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tokenyard.dialogue._WISH_AGAIN_S", 0.05)
        client = confined()
        handle = client.submit([1])
        lost: list[int] = []

        def lose_and_grant() -> None:
            eventually(lambda: connection.xlen(keys.wishers))
            lost.append(connection.delete(keys.wishers))
            eventually(lambda: connection.xlen(keys.wishers))
            granting.once()

        thread = threading.Thread(target=lose_and_grant)
        thread.start()
        assert handle.cancel() == Cancellation.CANCELLED
        thread.join(10)
        assert lost == [1]

    def test_too_many_wishes_are_refused(
        self, yard: StandIn, confined: NewClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_scripts, "MOST_WISHES", 1)
        client = confined(connect_timeout_s=0.3)
        for message in ("no coordinator", "too many"):
            with pytest.raises(WaitTimeout, match=message):
                client.submit([1]).cancel()

    def test_closing_leaves_to_the_coordinator_what_it_may_not_cancel(
        self, yard: StandIn, confined: NewClient, scripts: Scripts
    ) -> None:
        client = confined()
        client.submit_many([[1], [2]], cancel_on_disconnect=True)
        client.close()
        assert eventually(lambda: scripts.watch_clients(10) == [client.client_id])


class TestWaitingLine:
    def test_says_how_many_are_before_it_and_how_long_they_take(
        self, connection: redis.Redis, scripts: Scripts, new_client: NewClient
    ) -> None:
        StandIn(connection, scripts).open(rate=2)
        handles = new_client().submit_many([[1], [2], [3]])
        assert [(each.position, each.eta_s) for each in handles] == [(0, 0), (1, 0.5), (2, 1)]

    def test_says_nothing_of_what_nobody_knows(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client(client_id="me")
        handle = client.submit([1])
        assert (handle.position, handle.eta_s) == (0, None)
        known = new_client(client_id="me").submit([1], id=handle.id)
        assert (known.position, known.eta_s) == (None, None)

    def test_a_deadline_that_cannot_be_met_is_refused_where_asked(
        self, connection: redis.Redis, scripts: Scripts, new_client: NewClient
    ) -> None:
        yard = StandIn(connection, scripts)
        yard.open(rate=0.01)
        client = new_client()
        with pytest.raises(DeadlineUnmeetable) as caught:
            client.submit_many([[1], [2], [3]], deadline_s=50, refuse_late=True)
        assert caught.value.eta_s == 100
        assert client.submit([4], deadline_s=50).position == 1, "not where it was not asked"
        yard.answer_all()
        assert [each.result(WAIT_S).tokens for each in caught.value.accepted] == [[2]]

    def test_in_a_map_a_refused_deadline_is_a_result(
        self, connection: redis.Redis, scripts: Scripts, new_client: NewClient
    ) -> None:
        yard = StandIn(connection, scripts)
        yard.open(rate=0.01)
        answers = new_client().map([[1], [2]], deadline_s=50, refuse_late=True)
        index, result = next(answers)
        assert (index, result.status, result.error.code) == (1, "expired", "DEADLINE_EXCEEDED")
        yard.answer_all()
        assert [result.tokens for _, result in answers] == [[2]]


class TestCancelOnDisconnect:
    def test_closing_cancels_what_asked_for_it(
        self, yard: StandIn, new_client: NewClient, connection: redis.Redis, keys: Keys
    ) -> None:
        client = new_client(client_id="me")
        over = client.submit([1], cancel_on_disconnect=True)
        yard.answer_all()
        assert over.result(WAIT_S).tokens == [2]
        client.submit([1], id="stays")
        handle = client.submit([2], id="ends", cancel_on_disconnect=True)
        assert connection.smembers(keys.attached("me")) >= {b"ends"}
        client.close()
        with pytest.raises(WaitTimeout, match="cancelled with it"):
            handle.result()
        again = new_client(client_id="me")
        assert again.status("ends").state == "cancelled"
        assert again.status(over.id).state == "completed"
        assert again.status("stays").state == "waiting"
        assert not connection.exists(keys.attached("me"), keys.clients)

    def test_what_it_cannot_cancel_in_time_is_left_to_the_coordinator(
        self,
        yard: StandIn,
        new_client: NewClient,
        connection: redis.Redis,
        scripts: Scripts,
        keys: Keys,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tokenyard.dialogue._MOST_CANCELLED", 2)
        client = new_client(client_id="me")
        client.submit_many([[1], [2], [3]], cancel_on_disconnect=True)
        client.close()
        assert connection.scard(keys.attached("me")) == 1
        assert eventually(lambda: scripts.watch_clients(10) == ["me"])

    def test_the_lease_is_renewed_while_something_runs(
        self,
        yard: StandIn,
        new_client: NewClient,
        connection: redis.Redis,
        keys: Keys,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tokenyard.attendance.RENEW_EVERY_S", 0.01)
        monkeypatch.setattr("tokenyard.dialogue.BLOCK_MS", 20)
        client = new_client(client_id="me")
        handle = client.submit([1], cancel_on_disconnect=True)
        first = connection.zscore(keys.clients, "me")
        assert eventually(lambda: connection.zscore(keys.clients, "me") != first)
        # A coordinator that thought it gone meanwhile is corrected.
        connection.zrem(keys.clients, "me")
        assert eventually(lambda: connection.zscore(keys.clients, "me"))
        yard.answer_all()
        assert handle.result(WAIT_S).tokens == [2]
        assert eventually(lambda: not connection.exists(keys.attached("me"), keys.clients))

    def test_a_request_from_before_is_attached_too(
        self, yard: StandIn, new_client: NewClient, connection: redis.Redis, keys: Keys
    ) -> None:
        new_client(client_id="me").submit([1], id="q")
        again = new_client(client_id="me")
        again.submit([1], id="q", cancel_on_disconnect=True)
        again.close()
        assert new_client(client_id="me").status("q").state == "cancelled"

    def test_a_refused_request_is_not_attached(
        self, connection: redis.Redis, scripts: Scripts, new_client: NewClient, keys: Keys
    ) -> None:
        StandIn(connection, scripts).open(max_num_queued_reqs=1)
        client = new_client(client_id="me")
        with pytest.raises(QueueFull):
            client.submit_many([[1], {"prompt": [2], "id": "q"}], cancel_on_disconnect=True)
        client.close()
        assert not connection.exists(keys.ledger("me", "q"))


class TestServerWithoutMemory:
    def test_takes_nothing_new_and_gives_what_it_has(
        self, new_client_at: NewClient, own_broker: Server, keys: Keys
    ) -> None:
        with redis.Redis.from_url(own_broker.url, socket_timeout=30.0) as connection:
            yard = StandIn(connection, Scripts(connection, keys))
            yard.open()
            first = new_client_at(own_broker.url, client_id="me")
            first.submit([1], id="over")
            yard.answer_all()
            running = first.submit([2], id="running")
            connection.config_set("maxmemory", 1)
            with pytest.raises(BrokerUnavailable, match="full"):
                first.submit([3])
            assert running.cancel() == Cancellation.CANCELLED
            assert running.wait(WAIT_S).status == "cancelled"
            again = new_client_at(own_broker.url, client_id="me")
            assert again.attach("over").result(WAIT_S).tokens == [2]
            assert again.status("running").state == "cancelled"
            connection.config_set("maxmemory", 0)


class TestServerGoesAway:
    def test_handles_survive_a_restart(
        self, new_client_at: NewClient, own_broker: Server, keys: Keys
    ) -> None:
        with redis.Redis.from_url(own_broker.url, socket_timeout=30.0) as connection:
            yard = StandIn(connection, Scripts(connection, keys))
            yard.open()
            handle = new_client_at(own_broker.url).submit("go", stream=True)
            yard.dispatch()
            yard.emit(handle.id, [72])
            deltas = iter(handle)
            assert next(deltas).text == "H"
            own_broker.kill()
            own_broker.start()
            yard.emit(handle.id, [105])
            yard.finish(handle.id)
            assert [delta.text for delta in deltas] == ["i"]
            assert handle.result(WAIT_S).text == spell([72, 105])
