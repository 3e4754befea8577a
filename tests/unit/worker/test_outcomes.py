"""From an engine's output to published replies."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import make_assignment, make_request
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import (
    Choice,
    ErrorInfo,
    Provenance,
    Reply,
    Timing,
    to_delta,
    to_result,
)
from tokenyard.protocol.wire import Assignment, SamplingParams
from worker.engines import EngineInfo, Finished, RequestError, TokenDelta
from worker.process.outcomes import (
    Expired,
    Outcome,
    Run,
    delta_reply,
    epoch_to_store,
    merge,
    result_reply,
)

INFO = EngineInfo(
    "simulated", "7", "sim", "main", max_model_len=100, vocab_size=100, max_num_seqs=4
)


def delta(key: str, *tokens: int, index: int = 0, text: str | None = None) -> TokenDelta:
    return TokenDelta(key, index, list(tokens), text)


def finished(key: str, *tokens: int) -> Finished:
    return Finished(key, [Choice(0, list(tokens), None, "stop")], prompt_tokens=3)


class TestMerge:
    def test_deltas_of_a_choice_are_joined(self) -> None:
        events = [delta("a", 1, text="x"), delta("b", 7), delta("a", 2, 3, text="yz")]

        assert merge(events) == [delta("a", 1, 2, 3, text="xyz"), delta("b", 7)]

    def test_choices_stay_apart(self) -> None:
        events = [delta("a", 1), delta("a", 2, index=1), delta("a", 3)]

        assert merge(events) == [delta("a", 1, 3), delta("a", 2, index=1)]

    def test_a_result_replaces_the_deltas_before_it(self) -> None:
        end = finished("a", 1, 2)

        assert merge([delta("a", 1), delta("b", 5), end]) == [delta("b", 5), end]

    def test_the_first_end_counts(self) -> None:
        # Given a request whose deadline passes after its end and before its publication
        end = finished("a", 1, 2)

        assert merge([end, Expired("a", None, "running")]) == [end]

    def test_logprobs_are_joined(self) -> None:
        parts = [TokenDelta("a", 0, [n], None, [{"token": n}]) for n in (1, 2)]

        (joined,) = merge(parts)

        assert joined.logprobs == [{"token": 1}, {"token": 2}]

    def test_the_first_delta_tells_what_was_cached_and_the_last_how_it_ended(self) -> None:
        parts = [
            TokenDelta("a", 1, [1], cached_tokens=4, created_cache_tokens=8),
            TokenDelta("a", 1, [2]),
            TokenDelta("a", 1, [3], finish_reason="stop", stop_reason=3),
        ]

        told = {"cached_tokens": 4, "created_cache_tokens": 8}
        assert merge(parts) == [
            TokenDelta("a", 1, [1, 2, 3], **told, finish_reason="stop", stop_reason=3)
        ]

    def test_a_missing_text_stays_none(self) -> None:
        (joined,) = merge([delta("a", 1, text="x"), delta("a", 2, text=None)])

        assert joined == delta("a", 1, 2, text="x")

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=30))
    def test_no_token_is_lost_or_moved(self, made: list[tuple[str, int]]) -> None:
        joined = merge([delta(key, token) for key, token in made])

        for key in "abc":
            tokens = [t for one in joined if one.key == key for t in one.tokens]
            assert tokens == [token for owner, token in made if owner == key]
        assert len(joined) == len({key for key, _ in made})


def run(published: tuple[int, ...] = (), **request: object) -> Run:
    assignment: Assignment = make_assignment(
        make_request("q1", **request), entry="1500-0", sid="normal/1000-0", published=published
    )
    return Run(assignment, began=10.0)


def result(run: Run, end: Outcome) -> Reply:
    assert not isinstance(end, TokenDelta)
    return result_reply(run, end, INFO, "w.3", now=10.5)


class TestReplies:
    def test_deltas_count_the_tokens(self) -> None:
        running = run()
        first = to_delta(delta_reply(running, delta("1500-0", 5, 6, text="ab")))
        second = to_delta(delta_reply(running, delta("1500-0", 7)))

        assert (first.seq, first.tokens, first.text) == (0, [5, 6], "ab")
        assert (second.seq, second.tokens) == (2, [7])

    @pytest.mark.parametrize(("published", "told"), [((), (2, 3)), ((9,), (None, None))])
    def test_only_the_first_delta_of_a_stream_tells_what_was_cached(
        self, published: tuple[int, ...], told: tuple[int | None, int | None]
    ) -> None:
        first = TokenDelta("1500-0", 0, [5], cached_tokens=2, created_cache_tokens=3)

        shown = to_delta(delta_reply(run(published), first))

        assert (shown.cached_tokens, shown.created_cache_tokens) == told

    @pytest.mark.parametrize("stop", ["end", 7, None])
    def test_the_last_delta_of_a_choice_tells_how_it_ended(self, stop: str | int | None) -> None:
        last = TokenDelta("1500-0", 1, [5], finish_reason="stop", stop_reason=stop)

        told = to_delta(delta_reply(run(), last))

        assert (told.finish_reason, told.stop_reason) == ("stop", stop)

    @pytest.mark.parametrize("told", [(None, None), (0, 1), (2, 0)])
    def test_a_result_reports_how_much_of_the_prompt_was_cached(
        self, told: tuple[int | None, int | None]
    ) -> None:
        cached, created = told
        end = msgspec.structs.replace(
            finished("1500-0", 5), cached_tokens=cached, created_cache_tokens=created
        )
        ended = to_result(result(run(), end))

        assert (ended.usage.cached_tokens, ended.usage.created_cache_tokens) == told

    def test_a_result_has_all_fields(self) -> None:
        running = run(params=SamplingParams(seed=42))
        delta_reply(running, delta("1500-0", 5))
        running.first_token = 10.1

        ended = to_result(result(running, finished("1500-0", 5, 6)))

        assert (ended.status, ended.finish_reason, ended.tokens) == ("completed", "stop", [5, 6])
        assert ended.seq == 1, "tokens that were published as deltas"
        assert ended.usage.total_tokens == 5
        assert ended.provenance == Provenance("sim", "main", "simulated", "7", "w.3", 1, seed=42)
        assert ended.timing == Timing(500, 500.0, 100.0)
        assert ended.choices is None

    @pytest.mark.parametrize(
        ("asked", "told"), [("", "sim"), ("sim", "sim"), ("roman", "roman"), ("other", "sim")]
    )
    def test_the_model_of_a_result_is_the_adapter_that_answered(
        self, asked: str, told: str
    ) -> None:
        info = replace(INFO, adapters=("roman", "greek"))

        reply = result_reply(run(model=asked), finished("1500-0", 5), info, "w.3", now=10.5)

        made_by = to_result(reply).provenance
        assert made_by.model == told

    def test_several_choices_have_their_own_tokens(self) -> None:
        choices = [Choice(0, [1], "a", "stop", "x"), Choice(1, [2, 3], "bc", "length")]

        ended = to_result(result(run(), Finished("1500-0", choices, prompt_tokens=3)))

        assert ended.choices == choices
        assert (ended.tokens, ended.text, ended.stop_reason) == ([1], "a", "x")
        assert ended.usage.completion_tokens == 3

    def test_a_fault_in_the_middle_of_a_stream_keeps_its_tokens(self) -> None:
        # Given a stream that has published tokens in this attempt
        running = run(published=(1, 2))
        delta_reply(running, delta("1500-0", 3, 4))

        ended = to_result(result(running, RequestError("1500-0", Code.INFERENCE_ERROR, "no")))

        # I expect a result that agrees with the deltas.
        assert (ended.status, ended.seq, ended.tokens) == ("failed", 4, [1, 2, 3, 4])
        assert ended.error == ErrorInfo("INFERENCE_ERROR", "no")

    def test_an_expired_request_returns_its_tokens_so_far(self) -> None:
        running = run(published=(1, 2))
        delta_reply(running, delta("1500-0", 3))
        made = Finished("1500-0", [Choice(0, [1, 2, 3, 4], "abcd", "abort")], prompt_tokens=3)

        ended = to_result(result(running, Expired("1500-0", made, "running")))

        assert (ended.status, ended.seq, ended.tokens) == ("expired", 3, [1, 2, 3, 4])
        assert (ended.text, ended.finish_reason) == ("abcd", None)
        assert (ended.error.code, ended.error.message) == (
            "DEADLINE_EXCEEDED",
            "the deadline passed while the request was running",
        )
        assert ended.usage.completion_tokens == 4

    @pytest.mark.parametrize("made", [None, finished("1500-0", 1)])
    def test_an_expired_request_returns_at_least_the_published_tokens(
        self, made: Finished | None
    ) -> None:
        running = run(published=(1, 2))

        ended = to_result(result(running, Expired("1500-0", made, "on the worker's lane")))

        assert (ended.seq, ended.tokens, ended.text) == (2, [1, 2], None)


class TestEpochs:
    @pytest.mark.parametrize(
        ("carried", "began", "ended", "said"),
        [
            (None, None, None, (None, None)),
            (None, None, 0, (0, None)),  # no epoch was set when it began
            (None, 0, 0, (0, None)),
            (None, 0, 1, (1, 0)),
            (0, 1, 1, (1, 0)),  # another attempt published its first token
            (0, 1, 2, (2, 0)),
            (1, 1, 1, (1, None)),
            (0, None, None, (None, 0)),
        ],
    )
    def test_a_result_has_the_epochs_of_its_end_and_beginning(
        self,
        carried: int | None,
        began: int | None,
        ended: int | None,
        said: tuple[int | None, int | None],
    ) -> None:
        assignment = make_assignment(published=[1] if carried is not None else [])
        running = Run(msgspec.structs.replace(assignment, first_epoch=carried), 10.0, began)

        reply = result_reply(running, finished("1-0", 1, 2), INFO, "w.3", 10.5, ended)

        made = to_result(reply).provenance
        assert (made.epoch, made.first_epoch) == said

    def test_the_ledger_gets_the_epoch_of_the_beginning_once(self) -> None:
        running = Run(make_assignment(), 10.0, epoch=3)

        said = [
            epoch_to_store(running, delta_reply(running, one), epoch=4)
            for one in (delta("1-0"), delta("1-0", 1), delta("1-0", 2))
        ]

        assert said == [None, 3, None]

    def test_without_an_epoch_at_the_beginning_the_ledger_gets_the_first(self) -> None:
        running = Run(make_assignment(), 10.0)
        first, second = (delta_reply(running, delta("1-0", token)) for token in (1, 2))

        assert epoch_to_store(running, first, None) is None
        assert epoch_to_store(running, second, 5) == 5

    def test_an_epoch_from_an_earlier_attempt_is_not_sent_again(self) -> None:
        assignment = msgspec.structs.replace(make_assignment(published=[1]), first_epoch=2)
        running = Run(assignment, 10.0, epoch=3)

        assert epoch_to_store(running, delta_reply(running, delta("1-0", 2)), 3) is None
