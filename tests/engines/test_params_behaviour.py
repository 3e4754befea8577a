"""Same parameters, same results as vLLM itself: tokens, text, reasons and logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.harness import Outcome, ask, refused_field, run
from tokenyard.protocol.wire import RepetitionDetection, StructuredOutputs
from worker.engines import Engine
from worker.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.vllm

LONG = {"max_tokens": 12, "ignore_eos": True}
GREEDY = {"temperature": 0.0, **LONG}
#: How a repeated pattern ends an answer: the adder repeats itself after its end.
REPEATS = RepetitionDetection(max_pattern_size=2, min_pattern_size=1, min_count=2)
BIAS = {"logit_bias": {9: 100.0}}

CASES: list[dict[str, Any]] = [
    GREEDY,
    {"seed": 7, **LONG},
    {**GREEDY, "seed": -1},
    {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"seed": 7, "top_p": 0.6, "top_k": 5, "min_p": 0.05, **LONG},
    {**GREEDY, "stop": ["4"], "include_stop_str_in_output": True},
    {**GREEDY, "stop_token_ids": [8]},
    {**GREEDY, "min_tokens": 3, "ignore_eos": False},
    {**GREEDY, "logit_bias": {9: 50.0, 10: -50.0}},
    {**GREEDY, "allowed_token_ids": [8, 9]},
    {**GREEDY, "bad_words": ["4"]},
    {**GREEDY, "logprobs": 3, "prompt_logprobs": 2},
    {**GREEDY, "logprobs": 2, "flat_logprobs": True},
    {**GREEDY, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    {**GREEDY, "stream_interval": 4},
    {**GREEDY, "skip_reading_prefix_cache": True, "extra_args": {"mine": [1, "two"]}},
    {**GREEDY, "watermarking": False},
    {**GREEDY, **BIAS, "repetition_detection": REPEATS},
    {"temperature": 0.0, "structured_outputs": StructuredOutputs(regex="[0-9]{3}")},
]


def direct(engine: Engine, number: int, params: dict[str, Any]) -> Any:
    """vLLM's results for its own parameters, as from `LLM.generate`."""
    import msgspec
    import vllm
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        StructuredOutputsParams,
    )

    kinds = {
        "structured_outputs": StructuredOutputsParams,
        "repetition_detection": RepetitionDetectionParams,
    }
    given = {
        name: kinds[name](**msgspec.structs.asdict(value)) if name in kinds else value
        for name, value in params.items()
    }
    assert isinstance(engine, VllmEngine)
    inner = engine._open()
    given["output_kind"] = RequestOutputKind.FINAL_ONLY
    inner.add_request(f"direct-{number}", "12+34=", vllm.SamplingParams(**given))
    while inner.has_unfinished_requests():
        for output in inner.step():
            if output.finished:
                return output
    raise AssertionError("vLLM did not finish")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_the_answer_equals_that_of_vllm(vllm_engine: Engine, number: int, stream: bool) -> None:
    params = CASES[number]
    theirs = direct(vllm_engine, number, params)
    part = theirs.outputs[0]

    [ours] = run(vllm_engine, ask(prompt="12+34=", stream=stream, **params))

    assert ours.tokens == list(part.token_ids)
    assert (ours.choice.text, ours.choice.finish_reason) == (part.text, part.finish_reason)
    assert ours.choice.stop_reason == part.stop_reason
    if params.get("logprobs"):
        _same_logprobs(ours, part)


def _same_logprobs(ours: Outcome, part: Any) -> None:
    found = ours.choice.logprobs
    assert found is not None
    for mine, theirs in zip(found, part.logprobs, strict=True):
        assert mine["logprob"] == pytest.approx(theirs[mine["token"]].logprob, abs=1e-4)
        assert {one["token"] for one in mine["top"]} <= set(theirs)


def test_repetition_ends_an_answer(vllm_engine: Engine) -> None:
    """Given a model that can generate only one token, I expect the detection to end the answer."""
    [with_it, without] = run(
        vllm_engine,
        ask("1-0", prompt="1+1=", **GREEDY, **BIAS, repetition_detection=REPEATS),
        ask("2-0", prompt="1+1=", **GREEDY, **BIAS),
    )

    assert with_it.choice.finish_reason == "repetition"
    assert len(with_it.tokens) < len(without.tokens) == 12


def test_deltas_have_the_requested_number_of_tokens(vllm_engine: Engine) -> None:
    [outcome] = run(vllm_engine, ask(stream=True, stream_interval=4, **GREEDY))

    sizes = [len(delta.tokens) for delta in outcome.deltas]
    assert sizes == [1, 4, 4]
    assert outcome.tokens[: sum(sizes)] == outcome.streamed()


@pytest.mark.parametrize("published", [1, 3, 5, 9])
@pytest.mark.parametrize(
    "params",
    [
        {**GREEDY, "stream_interval": 4},
        {**GREEDY, "min_tokens": 8, "ignore_eos": False},
        {**GREEDY, "bad_words": ["4"], "stream_interval": 3},
        {**GREEDY, "allowed_token_ids": [8, 9], "repetition_detection": REPEATS},
        {"seed": 7, "stream_interval": 2, **LONG},
    ],
    ids=str,
)
def test_a_stream_continues_after_a_crash(
    vllm_engine: Engine, params: dict[str, Any], published: int
) -> None:
    """Given tokens that a dead worker published, I expect the rest: none twice, none missing."""
    [whole] = run(vllm_engine, ask(stream=True, **params))
    seen = whole.tokens[:published]

    [again] = run(vllm_engine, ask("2-0", stream=True, published=seen, **params))

    assert (again.tokens, again.choice.finish_reason) == (whole.tokens, whole.choice.finish_reason)
    streamed = again.streamed()
    assert whole.tokens[len(seen) : len(seen) + len(streamed)] == streamed


def test_a_seed_of_minus_one_is_no_seed(vllm_engine: Engine) -> None:
    """Given a seed of -1, which vLLM reads as none, I expect even a constraint to be served."""
    constrained = {"structured_outputs": StructuredOutputs(regex="[0-9]{3}"), "max_tokens": 8}
    outcomes = run(
        vllm_engine,
        ask("1-0", prompt="1+1=", seed=-1, **constrained),
        ask("2-0", prompt="1+1=", seed=-1, stream=True, **constrained),
        ask("3-0", prompt="1+1=", seed=-1, n=2, max_tokens=3),
    )

    assert [outcome.fault for outcome in outcomes] == [None] * 3


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_model_allows_are_refused(
    vllm_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(vllm_engine._open().vllm_config.model_config, "max_logprobs", 5)

    assert refused_field(vllm_engine, ask(**{name: -1})) == f"params.{name}"


def test_all_logprobs_are_ranked_by_size(
    vllm_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an engine that returns the whole vocabulary, I expect the likeliest first."""
    monkeypatch.setattr(vllm_engine._open().vllm_config.model_config, "max_logprobs", -1)

    [outcome] = run(vllm_engine, ask(logprobs=-1, prompt_logprobs=-1, **GREEDY))

    assert outcome.choice.logprobs
    assert outcome.finished.prompt_logprobs
    for one in (*outcome.choice.logprobs, *outcome.finished.prompt_logprobs[1:]):
        assert len(one["top"]) == vllm_engine.info.vocab_size
        sizes = [each["logprob"] for each in one["top"]]
        assert sizes == sorted(sizes, reverse=True)
        assert [each["rank"] for each in one["top"]] == list(range(1, len(sizes) + 1))
        assert one["top"][one["rank"] - 1]["token"] == one["token"]
