"""How a request continues after a crash: the decision, and text across the cut."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenyard.protocol.wire import RepetitionDetection, SamplingParams, StructuredOutputs
from worker.engines.resume import TextStream, Way, choose_way, derive_seed


@pytest.mark.parametrize(
    ("params", "way"),
    [
        ({}, Way.BEHIND),
        ({"temperature": 0.0}, Way.BEHIND),
        ({"temperature": 0.0, "seed": 1}, Way.BEHIND),
        ({"repetition_penalty": 1.2}, Way.BEHIND),
        ({"stop": "a", "logprobs": 3, "min_tokens": 2}, Way.BEHIND),
        ({"seed": 1}, Way.AGAIN),
        ({"presence_penalty": 0.1}, Way.AGAIN),
        ({"frequency_penalty": 0.1}, Way.AGAIN),
        ({"bad_words": ["a"]}, Way.AGAIN),
        ({"seed": -1, "stream_interval": 3}, Way.BEHIND),
        ({"repetition_detection": RepetitionDetection(1, 1, 2)}, Way.AGAIN),
        ({"thinking_token_budget": 0}, Way.AGAIN),
        ({"trace_decode_token_ids": [1]}, Way.AGAIN),
        ({"logprob_token_ids": [1]}, Way.AGAIN),
        ({"structured_outputs": StructuredOutputs(regex="a")}, Way.AGAIN),
    ],
    ids=str,
)
def test_only_a_request_whose_history_does_not_fit_a_prompt_is_repeated(
    params: dict[str, Any], way: Way
) -> None:
    given = SamplingParams(**params)

    assert choose_way(given, published=True, can_show_text=True) is way
    assert choose_way(given, published=True, can_show_text=False) is Way.AGAIN
    assert choose_way(given, published=False, can_show_text=False) is Way.FRESH


def test_a_derived_seed_is_the_same_everywhere_and_leaves_room_for_children() -> None:
    assert derive_seed("normal/1-0", "q1") == 167434432186554770
    assert derive_seed("normal/1-0", "q2") != derive_seed("normal/1-0", "q1")
    assert all(0 <= derive_seed(at) < 2**62 for at in range(1_000))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each byte, so most characters span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def shown_after_each(
    tokenizer: Tokenizer, text: str, **params: Any
) -> tuple[list[str], TextStream, str | None]:
    """The text shown with each token, up to a stop string."""
    stream = TextStream(tokenizer, tokenizer.encode("q").ids, SamplingParams(**params))
    shown = []
    for token in tokenizer.encode(text).ids:
        stop = stream.push(token)
        shown.append(stream.show(finished=stop is not None))
        if stop is not None:
            return shown, stream, stop
    return shown, stream, None


def test_characters_of_several_tokens_come_whole(tokenizer: Tokenizer) -> None:
    text = "aé語\U0001f600z"

    shown, stream, _ = shown_after_each(tokenizer, text)

    assert "".join(shown) == stream.text == text
    assert {len(piece) for piece in shown} == {0, 1}


def test_a_possible_start_of_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    shown, stream, stop = shown_after_each(tokenizer, "abcSTxSTOPz", stop=["STOP"])

    assert stop == "STOP"
    assert "".join(shown) == stream.text == "abcSTx"
    assert shown[3] == "a"


def test_the_stop_string_that_ends_first_counts(tokenizer: Tokenizer) -> None:
    _, stream, stop = shown_after_each(tokenizer, "abcdef", stop=["bcde", "cd"])

    assert (stop, stream.text) == ("cd", "ab")


def test_a_stop_string_can_stay_in_the_text(tokenizer: Tokenizer) -> None:
    _, stream, stop = shown_after_each(
        tokenizer, "abcdef", stop="cd", include_stop_str_in_output=True
    )

    assert (stop, stream.text) == ("cd", "abcd")


def test_stop_strings_wait_for_the_minimum_number_of_tokens(tokenizer: Tokenizer) -> None:
    _, stream, stop = shown_after_each(tokenizer, "a.b.c.", stop=".", min_tokens=3)

    assert (stop, stream.text) == (".", "a.b")
