"""A client's promises about results and replies, also after it reconnects."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.contract.conftest import WAIT_S, NewClient
from tests.contract.stand_in import LEASE_MS, MODEL, StandIn
from tests.contract.test_submitting import Letters
from tests.support.builders import worker_json
from tests.support.waiting import eventually
from tokenyard import RequestFailed, UnknownRequest, WaitTimeout
from tokenyard.protocol.replies import encode_reply
from tokenyard.protocol.wire import pack_tokens


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients look silent requests up soon."""
    monkeypatch.setattr("tokenyard.client.router.CHECK_AFTER_S", 0.05)
    monkeypatch.setattr("tokenyard.client.router.CHECK_EVERY_S", 0.05)


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

    def test_a_bad_prompt_has_a_failed_result(self, yard: StandIn, new_client: NewClient) -> None:
        with yard.running():
            answers = dict(new_client().map([[1], "", [3]]))
        assert answers[1].error.code == "INVALID_REQUEST"
        assert (answers[0].tokens, answers[2].tokens) == ([2], [4])

    @pytest.mark.long
    def test_map_waits_for_a_full_queue(self, yard: StandIn, new_client: NewClient) -> None:
        yard.tell(max_num_queued_reqs=4)
        with yard.running():
            answers = list(new_client().map([[number] for number in range(1, 21)]))
        assert sorted(result.tokens[0] for _, result in answers) == list(range(2, 22))

    def test_an_id_twice_in_a_burst_is_accepted_once(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        items = [{"prompt": [1], "id": "same"}, {"prompt": [1], "id": "same"}]
        with yard.running():
            answers = dict(new_client().map(items))
        assert answers[0] == answers[1]
        assert len(yard.seen) == 1

    def test_no_prompts_give_no_results(self, yard: StandIn, new_client: NewClient) -> None:
        assert list(new_client().map([])) == []

    def test_map_may_be_left_early(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client()
        with yard.running():
            answers = client.map(itertools.repeat([1]), window=5)
            assert next(answers)[1].tokens == [2]
            answers.close()
            assert client.submit([5]).result(WAIT_S).tokens == [6]

    def test_map_times_out_without_progress(self, yard: StandIn, new_client: NewClient) -> None:
        with pytest.raises(WaitTimeout):
            list(new_client(result_timeout_s=0.1).map([[1]]))


class TestStream:
    def test_all_deltas_together_are_the_reply(self, yard: StandIn, new_client: NewClient) -> None:
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

    def test_a_request_without_streaming_has_one_delta(
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

    def test_replies_of_many_requests_reach_their_handles(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handles = new_client().submit_many([[number] * 3 for number in range(1, 51)], stream=True)
        with yard.running():
            for number, handle in enumerate(handles, start=1):
                assert [token for delta in handle for token in delta.tokens] == [number + 1] * 3


class TestComingBack:
    def test_attach_returns_the_result(self, yard: StandIn, new_client: NewClient) -> None:
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

    @pytest.mark.parametrize("is_here", [True, False])
    def test_attach_makes_the_text_of_trimmed_replies(
        self,
        yard: StandIn,
        new_client: NewClient,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        is_here: bool,
    ) -> None:
        # Given a yard whose tokenizer is on this host, or on another
        monkeypatch.setattr("tokenyard.client.tokenization.load_tokenizer", lambda _: Letters())
        folder = tmp_path if is_here else tmp_path / "away"
        entry = worker_json("w", model=MODEL, tokenizer=str(folder))
        yard.scripts.renew(LEASE_MS, [(yard.worker, entry)])
        # and a client that has gone with what it had read
        first = new_client(client_id="me")
        before = iter(first.submit("go", id="q", stream=True))
        yard.dispatch()
        yard.emit("q", [72, 101])
        assert next(before).text == "He"
        first.close()

        # If another goes on, which has no tokenizer,
        deltas = iter(new_client(client_id="me").attach("q"))
        read = [next(deltas)]
        yard.emit("q", [108])
        read.append(next(deltas))
        yard.finish("q", [108, 111])
        read += deltas

        # I expect it to have the text of each delta, or all of it with the result.
        texts = [delta.text for delta in read]
        assert texts == (["He", "l", "lo"] if is_here else ["", "", "Hello"])

    def test_attach_reads_the_rest_of_the_stream(
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

    def test_attach_to_an_unknown_request_is_an_error(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        with pytest.raises(UnknownRequest, match="'q'"):
            new_client().attach("q")

    def test_read_replies_are_deleted(self, yard: StandIn, new_client: NewClient) -> None:
        client = new_client(client_id="me")
        with yard.running():
            for handle in client.submit_many([[1], [2], [3]]):
                handle.result(WAIT_S)
        assert eventually(lambda: yard.connection.xlen(yard.keys.replies("me")) == 0)

    def test_trimmed_replies_are_read_from_the_ledger(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        handle = new_client(client_id="me").submit("go", stream=True)
        yard.dispatch()
        # The first delta only reaches the ledger, as if it had been trimmed from the stream.
        yard.connection.append(yard.keys.tokens("me", handle.id), pack_tokens([72]))
        yard._published[handle.id] = [72]
        yard.emit(handle.id, [101])
        deltas = iter(handle)
        assert next(deltas).tokens == [72, 101]
        yard.finish(handle.id, [33], text="He!")
        assert "".join(delta.text or "" for delta in handle) == "He!"

    @pytest.mark.usefixtures("looks_often")
    def test_a_lost_reply_is_read_from_the_ledger(
        self, yard: StandIn, new_client: NewClient
    ) -> None:
        client = new_client(client_id="me")
        handle = client.submit([1])
        yard.dispatch()
        # The reply is lost; the ledger has the result.
        result = yard._result(handle.id, [9])
        found = {"state": "completed", "result": encode_reply(result.reply)}
        yard.connection.hset(yard.keys.ledger("me", handle.id), mapping=found)
        assert handle.result(WAIT_S).tokens == [9]

    @pytest.mark.usefixtures("looks_often")
    def test_a_forgotten_request_is_an_error(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client(client_id="me").submit([1])
        yard.connection.delete(yard.keys.ledger("me", handle.id))
        with pytest.raises(UnknownRequest):
            handle.result(WAIT_S)

    def test_hostile_replies_are_skipped(self, yard: StandIn, new_client: NewClient) -> None:
        handle = new_client(client_id="me").submit([1])
        for fields in ({"frame": b"\xff"}, {"frame": b"\x91\x01"}, {"id": b"\xff"}, {"x": "y"}):
            yard.connection.xadd(yard.keys.replies("me"), fields)
        yard.answer_all()
        assert handle.result(WAIT_S).tokens == [2]
