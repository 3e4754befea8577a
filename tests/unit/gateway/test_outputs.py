"""What vLLM's front end reads does not depend on the pieces that a worker published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.gateway.conftest import adder_tokenizer, core_request, vllm_params
from tokenyard.protocol.replies import Choice, Reply, Usage, json_text
from tokenyard.protocol.wire import pack_tokens

if TYPE_CHECKING:
    from gateway.frontend.outputs import OutputStream

PROMPT = [5, 6, 14, 7, 8, 16]
TOKENS = st.lists(st.integers(4, 16), min_size=1, max_size=12)
ENDS = st.sampled_from([("length", None), ("stop", 16), ("stop", None)])


def entry(token: int) -> dict[str, Any]:
    """Logprobs of one token."""
    one = {"token": token, "logprob": -0.25 * token, "rank": 2, "decoded": str(token)}
    return one | {"top": [one | {"token": token + 1, "rank": 1}, one]}


def result(choices: list[Choice], *, logprobs: bool = False, cached: int | None = 3) -> Reply:
    if logprobs:
        choices = [
            replace(choice, logprobs=[entry(token) for token in choice.tokens])
            for choice in choices
        ]
    first = choices[0]
    return Reply(
        id="cmpl-1",
        event="result",
        seq=0,
        tokens=pack_tokens(first.tokens),
        status="completed",
        finish_reason=first.finish_reason,
        stop_reason=None if first.stop_reason is None else json_text(first.stop_reason),
        usage=json_text(Usage(6, 1, 7, cached, 2)),
        logprobs=json_text(first.logprobs) if first.logprobs else None,
        choices=json_text(choices) if len(choices) > 1 else None,
    )


@st.composite
def splits(draw: st.DrawFn, tokens: list[int]) -> list[tuple[int, int]]:
    """Deltas of a stream as (from, to): in any pieces, some repeated, some overlapping.

    As in each engine, the tokens of the last step come with the result.
    """
    pieces: list[tuple[int, int]] = []
    at, last = 0, draw(st.integers(0, len(tokens) - 1))
    while at < last:
        to = draw(st.integers(at + 1, last))
        start = draw(st.integers(0, at))
        pieces.append((start if draw(st.booleans()) else at, to))
        if draw(st.booleans()):
            pieces.append(draw(st.sampled_from(pieces)))
        at = to
    return pieces


def open_stream(**params: Any) -> OutputStream:
    """The stream of a request with these parameters."""
    from gateway.frontend.outputs import OutputStream

    made = vllm_params(**params)
    return OutputStream(core_request(made, PROMPT), made, adder_tokenizer(), None, None)


def outputs(params: dict[str, Any], replies: list[Reply]) -> list[Any]:
    """What the front end would read, as plain values."""
    stream = open_stream(**params)
    found = []
    for reply in replies:
        for output in stream.read(reply):
            found += [
                (
                    one.index,
                    one.text,
                    list(one.token_ids),
                    one.logprobs,
                    one.cumulative_logprob,
                    one.finish_reason,
                    one.stop_reason,
                    output.finished,
                    (output.num_cached_tokens, output.num_cache_creation_tokens),
                )
                for one in output.outputs
            ]
    return found


def delta(tokens: list[int], start: int, to: int, *, logprobs: bool, **fields: Any) -> Reply:
    part = tokens[start:to]
    return Reply(
        id="cmpl-1",
        event="delta",
        seq=start,
        tokens=pack_tokens(part),
        logprobs=json_text([entry(token) for token in part]) if logprobs else None,
        cached_tokens=None if start else 3,
        created_cache_tokens=None if start else 2,
        **fields,
    )


@settings(deadline=None)
@given(st.data(), TOKENS, ENDS, st.booleans(), st.sampled_from([[], ["4+"], ["+", "555"]]))
def test_a_stream_in_any_pieces_is_the_same(
    data: st.DataObject,
    tokens: list[int],
    end: tuple[str, int | None],
    logprobs: bool,
    stop: list[str],
) -> None:
    params = {"stop": stop, "max_tokens": 12, "logprobs": 1 if logprobs else None}
    last = result([Choice(0, tokens, None, *end)], logprobs=logprobs)
    pieces = data.draw(splits(tokens))

    split = [delta(tokens, *piece, logprobs=logprobs) for piece in pieces]

    whole = outputs(params, [last])
    assert outputs(params, [*split, last]) == whole
    assert [token for one in whole for token in one[2]] == tokens
    assert all(len(one[2]) == 1 for one in whole)
    assert [one[7] for one in whole] == [False] * (len(tokens) - 1) + [True]
    assert whole[0][8] == (3, 2), "the front end reads what was cached from the first"


@settings(deadline=None)
@given(st.data(), st.lists(TOKENS, min_size=2, max_size=3), st.booleans())
def test_several_choices_in_any_pieces_are_the_same(
    data: st.DataObject, choices: list[list[int]], tells: bool
) -> None:
    """Given the same order of tokens, as all readers of a stream have it.

    An older worker does not tell in a delta that a choice has ended.
    """
    kinds = data.draw(st.lists(ENDS, min_size=len(choices), max_size=len(choices)))
    ends = [
        Choice(index, tokens, None, *kind)
        for index, (tokens, kind) in enumerate(zip(choices, kinds, strict=True))
    ]
    order = data.draw(st.permutations([i for i, tokens in enumerate(choices) for _ in tokens]))
    order = order[: data.draw(st.integers(0, len(order) - 1))]

    def replies(sizes: list[int]) -> list[Reply]:
        made, seq, at = [], 0, [0] * len(choices)
        while seq < len(order):
            index = order[seq]
            count = 1
            while count < sizes[seq] and order[seq + count : seq + count + 1] == [index]:
                count += 1
            part = choices[index][at[index] : at[index] + count]
            at[index] += count
            end = ends[index] if tells and at[index] == len(choices[index]) else None
            stop = json_text(end.stop_reason) if end and end.stop_reason is not None else None
            made.append(
                Reply(
                    id="cmpl-1",
                    event="delta",
                    seq=seq,
                    tokens=pack_tokens(part),
                    index=index,
                    finish_reason=end.finish_reason if end else None,
                    stop_reason=stop,
                )
            )
            seq += count
        return made

    last = result(ends)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(order), max_size=len(order)))
    params = {"n": len(choices), "max_tokens": 12}

    one_by_one = outputs(params, [*replies([1] * len(order)), last])
    in_pieces = outputs(params, [*replies(sizes), last])

    assert in_pieces == one_by_one
    for index, tokens in enumerate(choices):
        own = [one for one in one_by_one if one[0] == index]
        assert [token for one in own for token in one[2]] == tokens
        finished = [one[5:7] for one in own if one[5] is not None]
        assert finished == [(ends[index].finish_reason, ends[index].stop_reason)], "once"
        if tells:
            assert own[-1][2] == tokens[-1:], "with its last token"


def test_text_behind_a_stop_string_is_never_shown() -> None:
    params = {"stop": ["6"], "max_tokens": 12}
    tokens = [8, 10, 11, 12]  # "4", "6", ...: a step may make more than the worker counts

    shown = outputs(params, [result([Choice(0, tokens, None, "stop", "6")])])

    assert "".join(one[1] for one in shown) == "4"


def test_a_hole_is_filled_by_the_result() -> None:
    tokens = [4, 5, 6, 7, 8, 9]
    replies = [
        delta(tokens, 0, 2, logprobs=False),
        delta(tokens, 4, 5, logprobs=False),
        result([Choice(0, tokens, None, "length")]),
    ]

    assert outputs({}, replies) == outputs({}, [replies[0], replies[2]])


def test_the_prompts_logprobs_come_with_the_first_token() -> None:
    shown = [None, *(entry(token) for token in PROMPT[1:])]
    whole = replace(
        result([Choice(0, [4, 5, 6], "012", "length")]), prompt_logprobs=json_text(shown)
    )

    first, *others = list(open_stream(prompt_logprobs=1).read(whole))

    assert [position and min(position) for position in first.prompt_logprobs] == [
        None,
        *PROMPT[1:],
    ]
    assert [one.prompt_logprobs for one in others] == [None, None]
