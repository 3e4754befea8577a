"""The comparison of two servers' answers finds what it should."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.alike import CHAT, COMPLETIONS, RESPONSES, Event, Masks, merges

NOW = 1_000
BODY = {"id": "cmpl-" + "0a" * 8, "created": NOW, "choices": [{"text": "a", "logprobs": None}]}


def masked(path: str, body: Any) -> str:
    return Masks(path, range(NOW, NOW + 2)).replace(json.dumps(body))


def piece(text: str, *, index: int = 0, end: str | None = None) -> Event:
    choice = {"index": index, "text": text, "finish_reason": end}
    return Event("", json.dumps({"choices": [choice]}))


def test_ids_and_times_may_differ_and_nothing_else() -> None:
    other = BODY | {"id": "cmpl-" + "1b" * 8, "created": NOW + 1}

    assert masked(COMPLETIONS, BODY) == masked(COMPLETIONS, other)
    assert masked(COMPLETIONS, BODY) != masked(COMPLETIONS, BODY | {"choices": []})
    assert masked(COMPLETIONS, BODY) != masked(COMPLETIONS, dict(reversed(BODY.items())))


@pytest.mark.parametrize(
    "wrong",
    [{"id": "chatcmpl-" + "0a" * 8}, {"id": "cmpl-0"}, {"created": NOW - 9}, {"created": 1.5}],
    ids=str,
)
def test_ids_and_times_have_their_forms(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        masked(COMPLETIONS, BODY | wrong)


@pytest.mark.parametrize("name", ["id", "created"])
def test_ids_and_times_are_there(name: str) -> None:
    with pytest.raises(KeyError):
        masked(COMPLETIONS, {key: value for key, value in BODY.items() if key != name})


def test_the_id_of_a_call_is_known_by_its_place() -> None:
    call = {"id": "chatcmpl-tool-" + "0a" * 8, "type": "function"}
    body = {"id": "chatcmpl-" + "0a" * 8, "created": NOW}

    shown = masked(CHAT, body | {"choices": [{"message": {"tool_calls": [call]}}]})

    assert "chatcmpl" not in shown
    assert "chatcmpl" in masked(CHAT, body | {"choices": [{"tool_calls": [call]}]})


def test_an_id_stands_wherever_it_stood() -> None:
    def shown(*ids: str) -> list[str]:
        masks = Masks(RESPONSES, range(NOW, NOW + 1))
        events = [{"type": "response.output_text.delta", "item_id": f"msg_{one}"} for one in ids]
        return [masks.replace(json.dumps(event)) for event in events]

    first, second = "0a" * 8, "1b" * 8
    assert shown(first, first) == shown(second, second) != shown(first, second)


def test_merged_events_come_to_the_same() -> None:
    ours = [piece("a"), piece("b"), piece("c", end="stop")]

    assert merges(ours, ours) == 0
    assert merges(ours, [piece("ab"), piece("c", end="stop")]) == 1
    assert merges(ours, [piece("abc", end="stop")]) == 2


@pytest.mark.parametrize(
    "theirs",
    [
        [piece("ab"), piece("d", end="stop")],
        [piece("ab"), piece("c", end="length")],
        [piece("ab")],
        [piece("b"), piece("a"), piece("c", end="stop")],
        [piece("a"), piece("b"), piece("c", end="stop"), piece("")],
    ],
)
def test_streams_that_differ_are_told_apart(theirs: list[Event]) -> None:
    ours = [piece("a"), piece("b"), piece("c", end="stop")]

    with pytest.raises(AssertionError):
        merges(ours, theirs)


def test_choices_may_be_mingled_in_any_order() -> None:
    ours = [piece("a"), piece("x", index=1), piece("b")]

    assert merges(ours, [piece("x", index=1), piece("a"), piece("b")]) == 0
    with pytest.raises(AssertionError):
        merges(ours, [piece("x", index=1), piece("b"), piece("a")])


def test_numbers_of_events_are_their_places() -> None:
    def numbered(*numbers: int) -> list[Event]:
        made = [{"type": "x", "delta": "a", "sequence_number": number} for number in numbers]
        return [Event("x", json.dumps(one)) for one in made]

    with pytest.raises(AssertionError):
        merges(numbered(0, 2), [*numbered(0), *numbered(1)])
