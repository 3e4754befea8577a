"""Abilities that only vLLM has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
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
from tests.support.vllm_versions import installed_vllm
from tokenyard.protocol.wire import Assignment, StructuredOutputs
from worker.engines import Engine, TokenDelta
from worker.engines.vllm.branches import PieceSize, tokens_so_far

pytestmark = pytest.mark.vllm

DIGITS = range(4, 14)  # the adder's tokens "0" to "9"


def test_a_text_is_answered_with_a_text(vllm_engine: Engine) -> None:
    (outcome,) = run(vllm_engine, ask(prompt="12+34=", temperature=0.0))

    assert outcome.choice.text == "46"
    assert outcome.choice.finish_reason == "stop"
    assert outcome.choice.stop_reason is None


def test_messages_go_through_the_chat_template(vllm_engine: Engine) -> None:
    messages = [{"role": "user", "content": "12+34="}]

    (outcome,) = run(vllm_engine, ask(messages=messages, temperature=0.0))

    assert outcome.choice.text == "46"
    assert outcome.finished is not None
    assert outcome.finished.prompt_tokens == len(PROMPT)


def test_a_chat_continues_after_published_tokens(vllm_engine: Engine) -> None:
    given = {"messages": [{"role": "user", "content": ["12+34="]}], "stream": True}
    (before,) = run(vllm_engine, greedy(**given))

    (after,) = run(vllm_engine, greedy(**given, published=before.tokens[:2]))

    assert after.finished == before.finished


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "1" * 64}],
    ],
    ids=["no content", "empty", "over-long"],
)
def test_messages_that_the_template_rejects_are_refused(
    vllm_engine: Engine, messages: list[dict[str, Any]]
) -> None:
    assert refused_field(vllm_engine, ask(messages=messages)) == "messages"


@pytest.mark.parametrize("detokenize", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_request_without_stream_tells_its_tokens_when_it_is_taken_out(
    vllm_engine: Engine, detokenize: bool, choices: int
) -> None:
    params: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 7, "n": choices}
    (whole,) = run(vllm_engine, ask(**params, detokenize=detokenize))
    vllm_engine.add(ask(**params, detokenize=detokenize))
    vllm_engine.add(ask("2-0", **params))
    for _ in range(5):
        vllm_engine.step()

    made = vllm_engine.take_out("1-0")

    assert made is not None
    assert whole.finished is not None
    assert made.prompt_tokens == len(PROMPT)
    assert len(made.choices) == choices
    for choice, all_of_it in zip(made.choices, whole.finished.choices, strict=True):
        assert len(choice.tokens) == 5
        assert choice.tokens == all_of_it.tokens[:5]
    outcomes: dict[str, Outcome] = {}
    drain(vllm_engine, outcomes)
    assert list(outcomes) == ["2-0"]


def test_a_choice_that_has_ended_counts_when_its_request_is_taken_out(
    vllm_engine: Engine,
) -> None:
    stops = {"stop_token_ids": [4, 5, 6], "n": 3, "max_tokens": 30, "temperature": 2.0}
    for seed in range(20):
        (whole,) = run(vllm_engine, ask(**stops, seed=seed))
        assert whole.finished is not None
        lengths = sorted(len(choice.tokens) for choice in whole.finished.choices)
        if lengths[0] < lengths[-1]:
            break
    else:
        raise AssertionError("no choice ended before the others")
    vllm_engine.add(ask(**stops, seed=seed))
    steps = lengths[0]
    for _ in range(steps):
        vllm_engine.step()

    made = vllm_engine.take_out("1-0")

    assert made is not None
    assert [len(choice.tokens) for choice in made.choices] == [
        min(steps, len(choice.tokens)) for choice in whole.finished.choices
    ]


def test_tokens_are_unknown_where_vllm_has_no_such_records(vllm_engine: Engine) -> None:
    vllm_engine.add(ask(max_tokens=9))

    assert tokens_so_far(vllm_engine, "1-0") == ()
    assert tokens_so_far(None, "1-0") == ()
    vllm_engine.abort(["1-0"])


def test_tokens_are_answered_with_text_on_request(vllm_engine: Engine) -> None:
    (outcome,) = run(vllm_engine, ask(temperature=0.0, detokenize=True))

    assert outcome.choice.text == "46"


def test_stop_strings_work_without_text_in_the_answer(vllm_engine: Engine) -> None:
    (outcome,) = run(vllm_engine, ask(temperature=0.0, stop="4", stream=True))

    assert (outcome.choice.text, outcome.choice.stop_reason) == (None, "4")
    assert outcome.tokens == [8]


def pieces(engine: Engine, assignment: Assignment) -> list[int]:
    """Number of tokens in each delta of a stream."""
    engine.add(assignment)
    found = []
    while engine.has_unfinished:
        found += [len(one.tokens) for one in engine.step() if isinstance(one, TokenDelta)]
    return found


def test_a_stream_among_many_sends_its_tokens_in_groups(
    vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = run(vllm_engine, greedy(stream=True))
    monkeypatch.setattr(PieceSize, "choose", lambda *_: 4)

    together = pieces(vllm_engine, greedy(stream=True))
    (outcome,) = run(vllm_engine, greedy(stream=True, prompt="12+34=", tokens=None))

    assert together == [1, 4, 4]  # and three with the result
    assert outcome.tokens == outcome.streamed() + outcome.tokens[9:]
    assert outcome.tokens[:9] == outcome.streamed()
    assert run(vllm_engine, greedy(stream=True))[0].tokens == alone.tokens


def test_a_stream_with_a_deadline_or_without_an_interval_holds_nothing_back(
    vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PieceSize, "choose", lambda *_: 4)
    for field in ({"deadline_ms": 1}, {"stream_interval_ms": 0}):
        asked = greedy(stream=True)
        asked = msgspec.structs.replace(
            asked, request=msgspec.structs.replace(asked.request, **field)
        )
        assert pieces(vllm_engine, asked) == [1] * 11
    if installed_vllm() >= (0, 32):
        assert pieces(vllm_engine, greedy(stream=True, stream_interval=1)) == [1] * 11


def test_another_engine_opens_in_the_same_process_after_a_close(
    opened: dict[str, Engine], open_engine: Callable[[str], Engine]
) -> None:
    first = open_engine("vllm")
    first.add(greedy(stream=True))

    first.close()
    first.close()

    assert not first.has_unfinished
    assert first.step() == []
    del opened["vllm"]
    (outcome,) = run(open_engine("vllm"), ask(prompt="12+34=", temperature=0.0))
    assert outcome.choice.text == "46"


def test_an_engine_reports_the_time_of_each_start_phase(vllm_engine: Engine) -> None:
    phases_s = vllm_engine.info.phases_s

    loaded = ["config", "executor", "device", "weights", "kv cache", "warm-up"]
    assert list(phases_s) == loaded
    assert all(seconds >= 0 for seconds in phases_s.values())


# -------------------------------------------------------------------------------------- crashes


def resumed(engine: Engine, before: Outcome, cut: int, **given: Any) -> Outcome:
    (after,) = run(engine, ask(**given, published=before.tokens[:cut]))
    return after


@pytest.mark.parametrize("included", [True, False])
def test_a_stop_string_across_the_cut_is_found(vllm_engine: Engine, included: bool) -> None:
    free = {"prompt": "12+34=", "temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
    free["skip_special_tokens"] = False
    text = run(vllm_engine, ask(**free))[0].choice.text or ""
    given = free | {
        "stop": [text[3:12], "never"],
        "include_stop_str_in_output": included,
        "stream": True,
    }
    (before,) = run(vllm_engine, ask(**given))
    assert before.choice.stop_reason == text[3:12]
    shown = [delta.text or "" for delta in before.deltas]

    for cut in range(1, len(before.tokens)):
        after = resumed(vllm_engine, before, cut, **given)

        assert after.finished == before.finished, f"cut at {cut}"
        assert "".join(shown[:cut]) + after.streamed_text() == before.streamed_text()


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5, "temperature": 0.0},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"bad_words": ["46"], "temperature": 0.0},
        {"structured_outputs": StructuredOutputs(regex="[1-3]{6}[7-9]{6}")},
        {"min_tokens": 6, "temperature": 0.0, "ignore_eos": False},
        {"logit_bias": {5: 3.0}, "temperature": 0.0},
        {"allowed_token_ids": [5, 6, 7], "temperature": 0.0},
    ],
    ids=lambda params: next(iter(params)),
)
def test_a_request_with_a_history_continues_alike(
    vllm_engine: Engine, params: dict[str, Any]
) -> None:
    given = {"max_tokens": 12, "ignore_eos": True, "stream": True} | params
    (before,) = run(vllm_engine, ask(**given))

    for cut in range(1, len(before.tokens), 3):
        after = resumed(vllm_engine, before, cut, **given)

        assert after.finished == before.finished, f"cut at {cut}"
        assert before.tokens[:cut] + after.streamed() == before.tokens[:-1]


def test_logprobs_of_published_tokens_are_in_the_result(vllm_engine: Engine) -> None:
    given = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    given |= {"stream": True, "prompt_logprobs": 1, "prompt": "12+34="}
    (before,) = run(vllm_engine, ask(**given))

    after = resumed(vllm_engine, before, 3, **given)

    assert before.choice.logprobs
    assert after.choice.logprobs
    for old, new in zip(before.choice.logprobs, after.choice.logprobs, strict=True):
        assert (new["token"], new["rank"]) == (old["token"], old["rank"])
        assert new["decoded"] == old["decoded"]
        assert new["logprob"] == pytest.approx(old["logprob"], abs=1e-3)
        assert [one["token"] for one in new["top"]] == [one["token"] for one in old["top"]]
    assert after.finished is not None
    assert len(after.finished.prompt_logprobs or []) == len(PROMPT)


def test_a_stream_that_does_not_repeat_continues_after_its_published_tokens(
    vllm_engine: Engine,
) -> None:
    given = {"seed": 5, "temperature": 2.0, "max_tokens": 12, "ignore_eos": True, "stream": True}
    (before,) = run(vllm_engine, ask(**given))
    other = [*before.tokens[:2], next(one for one in DIGITS if one != before.tokens[2]), 5]

    (after,) = run(vllm_engine, ask(**given, published=other))

    assert after.tokens[:4] == other
    assert len(after.tokens) == 12
    assert other + after.streamed() == after.tokens[:-1]


def test_a_constraint_that_does_not_repeat_fails_alone(vllm_engine: Engine) -> None:
    constrained = ask(
        "1-0",
        stream=True,
        structured_outputs=StructuredOutputs(regex="[1-3]{6}"),
        temperature=0.0,
        published=[13, 13],
    )

    lost, neighbour = run(vllm_engine, constrained, greedy("2-0"))

    assert lost.fault is not None
    assert lost.fault.code == "INFERENCE_ERROR"
    assert len(neighbour.tokens) == 12


def test_published_tokens_that_complete_the_answer_end_it(vllm_engine: Engine) -> None:
    (before,) = run(vllm_engine, ask(prompt="12+34=", temperature=0.0, stream=True))

    after = resumed(
        vllm_engine, before, len(before.tokens), prompt="12+34=", temperature=0.0, stream=True
    )

    assert without_cache(after) == without_cache(before)


# ------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_are_plain_json_with_an_entry_for_each_token(
    vllm_engine: Engine, stream: bool
) -> None:
    (outcome,) = run(
        vllm_engine,
        ask(prompt="12+34=", temperature=0.0, logprobs=2, prompt_logprobs=1, stream=stream),
    )

    logprobs = outcome.choice.logprobs
    assert logprobs is not None
    assert [one["token"] for one in logprobs] == outcome.tokens
    assert (logprobs[0]["decoded"], logprobs[0]["rank"]) == ("4", 1)
    assert [one["rank"] for one in logprobs[0]["top"]] == [1, 2]
    for delta in outcome.deltas:
        assert [one["token"] for one in delta.logprobs or []] == list(delta.tokens)
    assert outcome.finished is not None
    prompt_logprobs = outcome.finished.prompt_logprobs
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    assert [one["token"] for one in prompt_logprobs[1:]] == PROMPT[1:]
    json.dumps([logprobs, prompt_logprobs], allow_nan=False)


def test_zero_logprobs_give_only_the_token_itself(vllm_engine: Engine) -> None:
    (outcome,) = run(vllm_engine, ask(logprobs=0, max_tokens=2, ignore_eos=True))

    logprobs = outcome.choice.logprobs
    assert logprobs is not None
    assert [one["top"] for one in logprobs] == [[], []]


def test_impossible_tokens_have_finite_logprobs(vllm_engine: Engine) -> None:
    (outcome,) = run(vllm_engine, greedy(allowed_token_ids=[0], logprobs=18))

    json.dumps(outcome.choice.logprobs, allow_nan=False)


# ---------------------------------------------------------------------------- structured outputs


@pytest.mark.parametrize("stream", [True, False])
def test_a_constraint_holds(vllm_engine: Engine, stream: bool) -> None:
    choice = StructuredOutputs(choice=["9-9", "8-8"])
    regex = StructuredOutputs(regex="[1-3]{4}=")

    chosen, matched = run(
        vllm_engine,
        ask("1-0", prompt="1+1=", structured_outputs=choice, stream=stream),
        ask("2-0", prompt="1+1=", structured_outputs=regex, stream=stream),
    )

    assert chosen.choice.text in {"9-9", "8-8"}
    assert len(matched.choice.text or "") == 5
    assert set((matched.choice.text or "")[:4]) <= set("123")
