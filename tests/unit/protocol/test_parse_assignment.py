"""tokenyard.protocol.parse: entries of a lane, beside the defaults of its model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.protocol.test_parse import FIELD_NAMES, GOOD, VALUES
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.wire import MAX_FIELDS, Assignment, Request, SamplingParams

ASSIGNED = {**GOOD, b"sid": b"normal/1-0", b"attempt": b"2", b"crashes": b"1"}
DEFAULTS = {"temperature": 0, "max_tokens": 64, "stop": ["\n"], "logit_bias": {"5": -1.0}}


def test_assignment_is_a_request_with_its_fencing_token() -> None:
    found = parse_assignment("5-0", ASSIGNED | {b"published": b"\1\0\0\0"})

    assert found == Assignment(
        request=Request(id="q1", prompt="Hello"),
        entry="5-0",
        sid="normal/1-0",
        attempt=2,
        crashes=1,
        published=b"\1\0\0\0",
    )


@pytest.mark.parametrize(
    ("said", "epoch"),
    [(b"0", 0), (b"1" * 19, int("1" * 19)), (b"", None), (b"-1", None), (b"9" * 5000, None)],
)
def test_epoch_that_makes_no_sense_is_none(said: bytes, epoch: int | None) -> None:
    found = parse_assignment("5-0", ASSIGNED | {b"epoch": said})

    assert found.first_epoch == epoch


@pytest.mark.parametrize(
    "fields",
    [
        {},
        GOOD,
        {b"attempt": b"1"},
        ASSIGNED | {b"id": b"\xff"},
        ASSIGNED | {b"sid": b"\xff"},
        ASSIGNED | {b"sid": b"normal/soon"},
        ASSIGNED | {b"attempt": b"first"},
        ASSIGNED | {b"attempt": b"-1"},
        ASSIGNED | {b"attempt": b"9" * 5000},
        ASSIGNED | {b"crashes": b"none"},
        ASSIGNED | {b"published": b"\0\0\0"},
    ],
)
def test_lane_entry_that_is_no_assignment(fields: dict[bytes, bytes]) -> None:
    assert parse_assignment("5-0", fields) is None


def test_assignment_that_this_version_cannot_read_says_so() -> None:
    found = parse_assignment("5-0", ASSIGNED | {b"params": b'{"flavour":1}'})

    assert found.fault == "params.flavour: there is no such parameter"
    assert (found.request.id, found.attempt) == ("q1", 2)


@given(
    st.dictionaries(FIELD_NAMES | st.binary(max_size=10), VALUES, max_size=12),
    st.sampled_from([None, DEFAULTS]),
)
def test_nothing_on_a_lane_makes_its_reader_raise(
    fields: dict[bytes, bytes], defaults: dict[str, Any] | None
) -> None:
    found = parse_assignment("5-0", fields, defaults)

    assert found is None or isinstance(found, Assignment)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, SamplingParams(temperature=0, max_tokens=64, stop=["\n"], logit_bias={5: -1.0})),
        (b"{}", SamplingParams(temperature=0, max_tokens=64, stop=["\n"], logit_bias={5: -1.0})),
        (
            b'{"temperature":0.5,"logit_bias":{"6":1}}',
            SamplingParams(temperature=0.5, max_tokens=64, stop=["\n"], logit_bias={6: 1.0}),
        ),
        (
            b'{"max_tokens":null,"stop":null,"logit_bias":null}',
            SamplingParams(temperature=0, max_tokens=None),
        ),
        # What the wire takes for a request that says nothing, said by the request.
        (
            b'{"max_tokens":16,"temperature":1,"stop":[],"logit_bias":{}}',
            SamplingParams(max_tokens=16, temperature=1, stop=[], logit_bias={}),
        ),
    ],
)
def test_a_model_says_what_a_request_leaves_out(
    said: bytes | None, expected: SamplingParams
) -> None:
    fields = ASSIGNED if said is None else ASSIGNED | {b"params": said}

    found = parse_assignment("5-0", fields, DEFAULTS)

    assert (found.fault, found.request.params) == ("", expected)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"{", "params: is not the JSON expected"),
        (b"[]", "params: Expected `object`, got `array`"),
        (b'{"flavour":1}', "params.flavour: there is no such parameter"),
        (b'{"top_p":0}', "params.top_p: Expected `float` > 0.0"),
        (b'{"stop":"\\ud800"}', "params: is not the JSON expected"),
        (b'{"\\ud800":1}', "params: is not the JSON expected"),
        (b'{"stop":' + b"[" * 100_000, "params: is not the JSON expected"),
        (b'{"min_tokens":65}', "params.min_tokens: must not exceed max_tokens"),
    ],
)
def test_invalid_params_are_refused_beside_defaults_too(said: bytes, error: str) -> None:
    found = parse_assignment("5-0", ASSIGNED | {b"params": said}, DEFAULTS)

    assert found.fault.startswith(error)


def test_defaults_are_no_further_field() -> None:
    """A request of as many fields as may be, and none of them ``params``, stays good."""
    most = {f"x{i}".encode(): b"" for i in range(MAX_FIELDS - len(GOOD))}

    found = parse_assignment("5-0", ASSIGNED | most, DEFAULTS)

    assert found.fault == ""


@given(VALUES)
def test_defaults_refuse_nothing_that_would_be_good_without_them(params: bytes) -> None:
    fields = ASSIGNED | {b"params": params}
    plain = parse_assignment("5-0", fields)
    found = parse_assignment("5-0", fields, {"temperature": 0.0, "top_k": 1})

    assert bool(found.fault) == bool(plain.fault)
