"""The behaviour of every engine: one suite that all of them pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.harness import (
    PROMPT,
    Outcome,
    ask,
    drain,
    greedy,
    refused_field,
    run,
    without_cache,
)
from worker.engines import Engine


def test_a_request_without_streaming_gets_one_answer(engine: Engine) -> None:
    (outcome,) = run(engine, greedy())

    assert not outcome.deltas
    assert len(outcome.tokens) == 12
    assert outcome.choice.finish_reason == "length"
    assert outcome.choice.text is None
    assert outcome.finished is not None
    assert outcome.finished.prompt_tokens == len(PROMPT)


def test_deltas_are_a_prefix_of_the_result_without_the_last_step(
    engine: Engine,
) -> None:
    (outcome,) = run(engine, greedy(stream=True))

    assert outcome.streamed() == outcome.tokens[:-1]
    assert all(delta.text is None for delta in outcome.deltas)


def test_a_request_gets_the_same_answer_alone_and_in_a_batch(engine: Engine) -> None:
    prompts = [[4 + digit, 14, 13 - digit, 16] for digit in range(8)]
    alone = [run(engine, greedy(tokens=prompt))[0].tokens for prompt in prompts]

    together = run(
        engine,
        *[
            greedy(f"{at}-0", tokens=prompt, stream=at % 2 == 0)
            for at, prompt in enumerate(prompts)
        ],
    )

    assert [outcome.tokens for outcome in together] == alone


@pytest.mark.parametrize("detokenize", [True, False])
def test_a_request_continues_after_published_tokens_at_every_cut(
    engine: Engine, detokenize: bool
) -> None:
    (before,) = run(engine, greedy(stream=True, detokenize=detokenize))
    tokens = before.tokens
    texts = [delta.text or "" for delta in before.deltas]

    for cut in range(1, len(tokens)):
        again = greedy(stream=True, detokenize=detokenize, published=tokens[:cut])
        (after,) = run(engine, again)

        assert after.finished == before.finished, f"cut at {cut}"
        assert tokens[:cut] + after.streamed() == tokens[:-1], f"cut at {cut}"
        assert "".join(texts[:cut]) + after.streamed_text() == before.streamed_text()


def test_a_request_with_a_seed_continues_with_the_same_tokens(engine: Engine) -> None:
    given = {"max_tokens": 10, "seed": 11, "ignore_eos": True, "stream": True}
    (before,) = run(engine, ask(**given))

    for cut in (1, 4, 9):
        (after,) = run(engine, ask(**given, published=before.tokens[:cut]))

        assert after.finished == before.finished
        assert before.tokens[:cut] + after.streamed() == before.tokens[:-1]


def test_an_answer_that_was_fully_published_ends_immediately(engine: Engine) -> None:
    (before,) = run(engine, greedy(stream=True))

    (after,) = run(engine, greedy(stream=True, published=before.tokens))

    assert without_cache(after) == without_cache(before)
    assert not after.deltas


#: A third of the simulated engine's vocabulary.
STOPS = list(range(0, 1_000, 3))
SEVERAL = {"n": 3, "max_tokens": 12, "temperature": 2.0, "stream": True}


def cut_off(outcome: Outcome, deltas: int) -> dict[str, Any]:
    """The history that the next attempt gets after this many published deltas."""
    shown = outcome.deltas[:deltas]
    return {
        "published": [token for delta in shown for token in delta.tokens],
        "choices": b"".join(bytes([delta.index]) * len(delta.tokens) for delta in shown),
    }


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": True},
        {"ignore_eos": True, "seed": 3},
        {"seed": 5},
        {"seed": 7, "stop_token_ids": [5, 6]},
        {"stop_token_ids": [5, 6]},
        {"stop_token_ids": [3, 4], "ignore_eos": True, "detokenize": True},
        {"stop": ["1", "7", "a"], "detokenize": True},
        {"stop": ["2", "b"], "include_stop_str_in_output": True, "detokenize": True, "seed": 9},
    ],
    ids=str,
)
def test_each_of_several_choices_continues_after_its_own_tokens(
    engine: Engine, params: dict[str, Any]
) -> None:
    """Given a stream cut at any place, also where some choices have ended."""
    (before,) = run(engine, ask(**SEVERAL | params))
    assert before.finished is not None
    is_same = "seed" in params or engine.info.engine == "simulated"
    assert before.deltas, "there is something to cut"

    for cut in range(1, len(before.deltas) + 1):
        known = cut_off(before, cut)
        seen = [
            [
                token
                for token, whose in zip(known["published"], known["choices"], strict=True)
                if whose == index
            ]
            for index in range(3)
        ]
        (after,) = run(engine, ask(**SEVERAL | params | known))

        assert after.finished is not None, after.fault
        assert [choice.index for choice in after.finished.choices] == [0, 1, 2]
        for choice, was in zip(after.finished.choices, before.finished.choices, strict=True):
            streamed = seen[choice.index] + after.streamed(choice.index)
            assert streamed == choice.tokens[: len(streamed)]
            assert choice.finish_reason in ("length", "stop")
            assert len(choice.tokens) <= 12
            if is_same:
                assert (choice.tokens, choice.finish_reason) == (was.tokens, was.finish_reason)
                assert (choice.text, choice.stop_reason) == (was.text, was.stop_reason)
            if len(was.tokens) == len(seen[choice.index]) < 12:
                assert choice.tokens == was.tokens, "it had ended"
        assert not engine.has_unfinished


def test_a_choice_that_ends_before_others_says_so_in_its_last_delta(engine: Engine) -> None:
    params = {"stop_token_ids": list(range(3, 14)) if engine.info.engine == "vllm" else STOPS}
    for seed in range(20):
        (outcome,) = run(engine, ask(**SEVERAL | params | {"seed": seed}))
        ends = [delta for delta in outcome.deltas if delta.finish_reason]
        assert outcome.finished is not None
        for last in ends:
            choice = outcome.finished.choices[last.index]
            assert outcome.streamed(last.index) == choice.tokens
            assert (last.finish_reason, last.stop_reason) == (
                choice.finish_reason,
                choice.stop_reason,
            )
            assert [one for one in outcome.deltas if one.index == last.index][-1] is last
        early = [
            one for one in outcome.finished.choices if outcome.streamed(one.index) == one.tokens
        ]
        assert len(ends) == len(early)
        if ends:
            return
    raise AssertionError("no choice ended before the others")


def test_the_only_choice_tells_its_end_in_the_result_alone(engine: Engine) -> None:
    (outcome,) = run(engine, greedy(stream=True))

    assert not any(delta.finish_reason for delta in outcome.deltas)


def test_an_aborted_request_of_several_choices_gives_no_more_output(engine: Engine) -> None:
    (before,) = run(engine, ask(**SEVERAL, ignore_eos=True))
    known = cut_off(before, 4)
    engine.add(ask("1-0", **SEVERAL, ignore_eos=True, **known))
    engine.add(ask("2-0", **SEVERAL, ignore_eos=True, **known))
    engine.step()
    engine.abort(["1-0"])
    made = engine.take_out("2-0")

    assert not engine.has_unfinished
    assert made is not None
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    tokens = [token for choice in made.choices for token in choice.tokens]
    assert len(tokens) >= len(known["published"])


def test_several_choices_need_the_choice_of_each_published_token(engine: Engine) -> None:
    assert refused_field(engine, ask(n=2, stream=True, published=[5])) == "params.n"


def test_the_progress_of_a_whole_answer_is_told_before_its_end(engine: Engine) -> None:
    engine.add(greedy("1-0"))
    engine.add(greedy("2-0", stream=True))

    seen = []
    while engine.has_unfinished:
        engine.step()
        told = engine.progress()
        assert "2-0" not in told
        seen.append(told.get("1-0", 0))

    *before, last = seen
    assert (before, last) == (sorted(before), 0)
    # The simulated engine of this suite makes whole answers in one step.
    assert engine.info.engine == "simulated" or len(set(before)) > 5


def test_an_aborted_request_gives_no_more_output_and_its_neighbour_continues(
    engine: Engine,
) -> None:
    engine.add(greedy("1-0", stream=True))
    engine.add(greedy("2-0", stream=True))
    engine.step()

    engine.abort(["1-0", "unknown"])

    outcomes = {}
    drain(engine, outcomes)
    assert list(outcomes) == ["2-0"]
    assert len(outcomes["2-0"].tokens) == 12


def test_a_request_can_be_aborted_before_it_starts(engine: Engine) -> None:
    engine.add(greedy())

    engine.abort(["1-0"])

    assert not engine.has_unfinished
    assert engine.step() == []


@pytest.mark.parametrize("stream", [True, False])
def test_two_choices_have_their_own_index(engine: Engine, stream: bool) -> None:
    given = ask(n=2, seed=3, max_tokens=20, ignore_eos=True, temperature=2.0, stream=stream)

    (outcome,) = run(engine, given)

    assert outcome.finished is not None
    first, second = outcome.finished.choices
    assert (first.index, second.index) == (0, 1)
    assert first.tokens != second.tokens
    for choice in (first, second):
        streamed = outcome.streamed(choice.index)
        assert len(choice.tokens) == 20
        assert streamed == choice.tokens[: len(streamed)]
        assert len(streamed) >= 19 if stream else not streamed


def test_a_stop_token_ends_an_answer_and_is_part_of_it(engine: Engine) -> None:
    (free,) = run(engine, greedy())
    stop = free.tokens[3]
    at = free.tokens.index(stop)

    (outcome,) = run(engine, greedy(stop_token_ids=[stop]))

    assert outcome.tokens == free.tokens[: at + 1]
    assert (outcome.choice.finish_reason, outcome.choice.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("stream", [True, False])
def test_the_same_seed_gives_the_same_tokens(engine: Engine, stream: bool) -> None:
    def sampled(seed: int) -> list[int]:
        given = ask(seed=seed, max_tokens=16, ignore_eos=True, temperature=2.0, stream=stream)
        return run(engine, given)[0].tokens

    assert sampled(7) == sampled(7)
    assert sampled(7) != sampled(8)


def test_an_answer_ends_where_the_model_ends_it(engine: Engine) -> None:
    room = engine.info.max_model_len - len(PROMPT)

    for max_tokens in (None, 10_000):
        (outcome,) = run(engine, greedy(max_tokens=max_tokens))

        assert len(outcome.tokens) == room
        assert outcome.choice.finish_reason == "length"


def test_streamed_text_equals_the_text_of_the_answer(engine: Engine) -> None:
    (outcome,) = run(engine, greedy(prompt="12+34=", stream=True))

    assert outcome.choice.text
    assert outcome.choice.text.startswith(outcome.streamed_text())
    assert outcome.streamed_text()


def test_a_stop_string_ends_an_answer_and_is_cut_off(engine: Engine) -> None:
    (free,) = run(engine, greedy(prompt="12+34=", skip_special_tokens=False))
    text = free.choice.text or ""
    stop = text[4:6]
    at = text.index(stop)

    for included in (True, False):
        given = greedy(
            prompt="12+34=",
            stream=True,
            stop=["~none~", stop],
            include_stop_str_in_output=included,
            skip_special_tokens=False,
        )
        (outcome,) = run(engine, given)

        assert outcome.choice.text == text[: at + len(stop) * included]
        assert (outcome.choice.finish_reason, outcome.choice.stop_reason) == ("stop", stop)
        assert outcome.choice.text.startswith(outcome.streamed_text())


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *(("tokens", {"tokens": one}) for one in ([], [5] * 64, [5] * 5_000, [5, 100_000])),
        *(("tokens", {"tokens": one}) for one in ([5, -1], [2**31 - 1])),
        *(("prompt", {"prompt": "1" * length}) for length in (64, 1_000_000)),
        *(("params.stop_token_ids", {"stop_token_ids": [one]}) for one in (100_000, -1)),
        *(("params.logit_bias", {"logit_bias": {one: 1.0}}) for one in (100_000, -5)),
        *(("params.allowed_token_ids", {"allowed_token_ids": one}) for one in ([5, 100_000], [])),
        ("params.stop", {"prompt": "1+1=", "stop": ["a", ""]}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_run_is_refused_by_name(
    engine: Engine, field: str, given: dict[str, Any]
) -> None:
    assert refused_field(engine, ask(**given)) == field


def test_an_engine_reports_what_it_serves(engine: Engine, request: pytest.FixtureRequest) -> None:
    info = engine.info

    assert info.engine in request.node.name
    assert info.engine_version
    assert info.max_model_len == 64
    assert info.max_num_seqs > 0
