"""A client's promises about submitted requests."""

from __future__ import annotations

import datetime
import math
import threading
from typing import Any

import pytest

from tests.contract.conftest import WAIT_S, NewClient
from tests.contract.stand_in import MODEL, StandIn
from tokenyard import (
    DeadlineUnmeetable,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    SamplingParams,
    WaitTimeout,
)
from tokenyard.protocol.wire import ChatOptions, unpack_tokens


class Letters:
    """A tokenizer: one token for each UTF-8 byte; 0 is special and ends a prompt."""

    def encode(self, texts: Any) -> list[list[int]]:
        return [[*text.encode(), 0] for text in texts]

    def decode(self, tokens: Any, *, skip_special_tokens: bool) -> str:
        shown = [token for token in tokens if token or not skip_special_tokens]
        return bytes(shown).decode(errors="replace")


class TestSubmit:
    def test_token_ids_are_answered_with_token_ids(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client().submit([1, 2, 3], max_tokens=4, temperature=0)
        yard.dispatch()
        [request] = yard.seen
        assert unpack_tokens(request.tokens or b"") == [1, 2, 3]
        assert request.params == SamplingParams(max_tokens=4, temperature=0)
        yard.finish(handle.id, [7, 8], finish_reason="stop")
        result = handle.result(WAIT_S)
        assert (result.id, result.status, result.tokens) == (handle.id, "completed", [7, 8])
        assert (result.text, result.finish_reason) == (None, "stop")

    def test_text_reaches_the_worker_as_text(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit("HAL")
        yard.answer_all()
        assert yard.seen[0].prompt == "HAL"
        assert handle.result(WAIT_S).text == "IBM"

    def test_options_of_a_chat_template_reach_the_worker(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "HAL"}]}]
        options: dict[str, Any] = {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "documents": [{"title": "t", "text": "x"}],
            "chat_template_kwargs": {"enable_thinking": False},
            "add_generation_prompt": False,
            "continue_final_message": True,
        }
        client = new_client()
        client.submit(messages, **options)
        client.submit_many([messages, {"prompt": messages, "tools": []}], **options)
        yard.dispatch()
        first, second, third = (request.chat for request in yard.seen)
        assert first == second == ChatOptions(**options)
        assert third == ChatOptions(**options | {"tools": []})
        assert [request.messages for request in yard.seen] == [messages] * 3

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
            cache_salt="mine",
            metadata={"traceparent": "00-1"},
        )
        yard.dispatch()
        [request] = yard.seen
        assert (request.id, request.client, request.model) == ("mine", "tester", MODEL)
        assert request.params == SamplingParams(top_p=0.5, seed=7, stop=["x"])
        assert (request.priority, request.deadline_ms) == (3, 4102444800000)
        assert (request.result_ttl_s, request.tenant, request.session) == (60, "t", "s")
        assert request.metadata == {"traceparent": "00-1"}
        assert request.cache_salt == "mine"
        assert yard.lane["mine"].sid.startswith("low:t/")

    def test_failure_is_raised_or_returned(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client().submit([1])
        yard.dispatch()
        yard.fail(handle.id, "INFERENCE_ERROR", "it broke")
        with pytest.raises(RequestFailed, match="INFERENCE_ERROR: it broke") as caught:
            handle.result(WAIT_S)
        assert caught.value.code == "INFERENCE_ERROR"
        result = handle.wait(WAIT_S)
        assert result == caught.value.result
        assert (result.ok, result.status) == (False, "failed")

    def test_wait_for_a_result_is_bounded(self, yard: StandIn, new_client: NewClient) -> None:
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
    def test_an_invalid_option_is_reported_immediately(
        self, yard: StandIn, new_client: NewClient, prompt: Any, options: Any, field: str
    ) -> None:
        with pytest.raises(InvalidRequest) as caught:
            new_client().submit(prompt, **options)
        assert caught.value.field == field
        assert yard.dispatch() == 0

    def test_a_full_queue_is_reported_immediately(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        yard.tell(max_num_queued_reqs=2)
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
    def test_a_burst_gets_all_its_answers(self, yard: StandIn, new_client: NewClient) -> None:
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

    def test_a_burst_larger_than_one_script_call_is_answered(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handles = new_client().submit_many([[number] for number in range(1, 1001)])
        yard.answer_all()
        answers = [handle.result(WAIT_S).tokens for handle in handles]
        assert answers == [[number + 1] for number in range(1, 1001)]


class TestWaitingLine:
    def test_handle_has_position_and_estimated_time(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        yard.tell(rate=2)
        handles = new_client().submit_many([[1], [2], [3]])
        assert [(each.position, each.eta_s) for each in handles] == [(0, 0), (1, 0.5), (2, 1)]

    def test_handle_without_known_rate_has_no_estimate(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        client = new_client(client_id="me")
        handle = client.submit([1])
        assert (handle.position, handle.eta_s) == (0, None)
        known = new_client(client_id="me").submit([1], id=handle.id)
        assert (known.position, known.eta_s) == (None, None)

    def test_an_unmeetable_deadline_is_refused_on_request(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        yard.tell(rate=0.01)
        client = new_client()
        with pytest.raises(DeadlineUnmeetable) as caught:
            client.submit_many([[1], [2], [3]], deadline_s=50, refuse_late=True)
        assert caught.value.eta_s == 100
        assert client.submit([4], deadline_s=50).position == 1, "not where it was not asked"
        yard.answer_all()
        assert [each.result(WAIT_S).tokens for each in caught.value.accepted] == [[2]]

    def test_a_refused_deadline_is_a_result_in_a_map(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        yard.tell(rate=0.01)
        answers = new_client().map([[1], [2]], deadline_s=50, refuse_late=True)
        index, result = next(answers)
        assert (index, result.status, result.error.code) == (1, "expired", "DEADLINE_EXCEEDED")
        yard.answer_all()
        assert [result.tokens for _, result in answers] == [[2]]


class TestLocalTokenizer:
    def test_the_client_tokenizes_and_detokenizes_text(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client(tokenizer=Letters()).submit("hi")
        yard.dispatch()
        assert unpack_tokens(yard.seen[0].tokens or b"") == [104, 105, 0]
        assert yard.seen[0].params.detokenize is False
        yard.finish(handle.id, list("Grüße".encode()))
        assert handle.result(WAIT_S).text == "Grüße"

    def test_deltas_that_break_inside_characters_join_to_whole_text(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
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

    def test_a_reply_cut_inside_a_character_has_a_replacement(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
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

    def test_token_ids_are_not_detokenized(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client(tokenizer=Letters())
        plain, with_text = client.submit([1]), client.submit([1], detokenize=True)
        yard.dispatch()
        yard.finish(plain.id, [65])
        yard.finish(with_text.id, [65])
        assert (plain.result(WAIT_S).text, with_text.result(WAIT_S).text) == (None, "A")
