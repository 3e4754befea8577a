"""Tasks that pool: what is refused, and the numbers of a result."""

from __future__ import annotations

import re
from array import array
from typing import Any

import msgspec
import pytest

from tests.support.numbers import numbers_of
from tokenyard import PoolingParams, Result, SamplingParams
from tokenyard.protocol.errors import Code
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.replies import (
    ErrorInfo,
    Reply,
    decode_replies,
    json_text,
    split_result,
    to_result,
)
from tokenyard.protocol.wire import MAX_INPUTS, Refused, Request, template_of

PARAMS = {"prompt": b"x", "task": b"embed"}


def parsed(**fields: bytes) -> Any:
    return parse_request({b"id": b"q", **{name.encode(): one for name, one in fields.items()}})


def test_a_request_that_pools() -> None:
    inputs: list[Any] = ["a", [1, 2], [[1], [2]]]
    fields = {"inputs": msgspec.json.encode(inputs), "params": b'{"dimensions":8}'}

    found = parsed(task=b"embed", **fields)

    assert found == Request(
        id="q", inputs=inputs, task="embed", pooling=PoolingParams(dimensions=8)
    )
    assert found.params == SamplingParams()
    assert not found.wants_text
    assert found.work == -(-len(msgspec.json.encode(inputs)) // 4)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"prompt": b"x", "task": b"embedd"},
            "task: use one of generate, .*did you mean embed",
        ),
        ({"inputs": b'["a"]'}, "inputs: go with one of the tasks embed, "),
        ({"inputs": b"[]", "task": b"embed"}, "inputs: give 1 to 2048, not 0"),
        (
            {"inputs": msgspec.json.encode(["a"] * (MAX_INPUTS + 1)), "task": b"embed"},
            "inputs: give 1 to 2048, not 2049",
        ),
        ({"inputs": b'["a",""]', "task": b"embed"}, r"inputs\[1\]: is empty"),
        ({"inputs": b"[[1],[]]", "task": b"embed"}, r"inputs\[1\]: is empty"),
        (
            {"inputs": b"[[1,[2]]]", "task": b"embed"},
            r"inputs\[0\]: give a text, token ids, or two",
        ),
        ({"inputs": b"[[[1],[2],[3]]]", "task": b"embed"}, r"inputs\[0\]: give a text"),
        ({"inputs": b"[[[1],[]]]", "task": b"embed"}, r"inputs\[0\]: is empty"),
        ({"inputs": b"[[-1]]", "task": b"embed"}, r"inputs\[0\]\[\.\.\.\]: |inputs"),
        ({"inputs": b"[1]", "task": b"embed"}, "inputs"),
        ({**PARAMS, "stream": b"1"}, "stream: the task embed has no tokens to stream"),
        ({**PARAMS, "query": b"q"}, "query: goes with the task score, not with embed"),
        ({"prompt": b"x", "task": b"score"}, "query: is missing"),
        ({"tokens": b"[1]", "task": b"score", "query": b"q"}, "prompt: give text"),
        ({"inputs": b"[[1]]", "task": b"score", "query": b"q"}, r"inputs\[0\]: give text"),
        (
            {**PARAMS, "params": b'{"temperature":0}'},
            "params.temperature: is for the task generate",
        ),
        ({**PARAMS, "params": b'{"dimension":0}'}, "params.dimension: .*did you mean dimensions"),
        ({**PARAMS, "params": b'{"dimensions":0}'}, "params.dimensions: "),
        ({"prompt": b"x", "params": b'{"dimensions":8}'}, "params.dimensions: "),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, bytes], why: str) -> None:
    found = parsed(**fields)

    assert isinstance(found, Refused)
    assert found.code is Code.INVALID_REQUEST
    assert re.match(why, found.message), found.message


def test_inputs_are_no_common_field() -> None:
    template = template_of(Request(id="q", inputs=["a", "b"], task="embed"))
    assert template.field == "inputs"
    assert msgspec.json.decode(template.common) == {"v": "1", "task": "embed"}


def reply(**fields: Any) -> Reply:
    return Reply(id="q", event="result", seq=0, tokens=b"", status="completed", **fields)


def packed(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


def test_numbers_of_each_input() -> None:
    numbers = reply(
        data=packed(1, 2, 3, 4, 5, 6, 7),
        shapes=json_text([[2], None, [2, 2], []]),
        errors=json_text({1: ErrorInfo("INVALID_REQUEST", "no")}),
        input_tokens=json_text([3, 0, 2, 1]),
    )
    flat = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in msgspec.to_builtins(numbers, builtin_types=(bytes,)).items()
    }
    [read] = decode_replies(flat)
    assert read == numbers
    result = to_result(read)

    assert numbers_of(result) == [[1, 2], None, [3, 4, 5, 6], [7]]
    assert result.shapes == [[2], None, [2, 2], []]
    _are_split(result)


def _are_split(result: Result) -> None:
    first, failed, rows, score = split_result(result, 4)
    assert [one.id for one in (first, failed, rows, score)] == ["q#0", "q#1", "q#2", "q#3"]
    assert [one.ok for one in (first, failed, rows, score)] == [True, False, True, True]
    assert failed.error == ErrorInfo("INVALID_REQUEST", "no")
    assert (rows.shapes, numbers_of(rows)) == ([[2, 2]], [[3, 4, 5, 6]])
    assert numbers_of(failed) == [None]
    assert first.usage is not None
    assert first.usage.prompt_tokens == 3


def test_a_failed_result_is_that_of_each_input() -> None:
    failed = to_result(
        Reply(
            id="q",
            event="result",
            seq=0,
            tokens=b"",
            status="failed",
            error=json_text(ErrorInfo("POISONED", "why")),
        )
    )
    assert [(one.id, one.error) for one in split_result(failed, 2)] == [
        ("q#0", ErrorInfo("POISONED", "why")),
        ("q#1", ErrorInfo("POISONED", "why")),
    ]
