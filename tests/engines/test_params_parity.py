"""The wire's sampling parameters equal vLLM's: same names, same defaults, no wider bounds."""

from __future__ import annotations

import dataclasses
import os
from textwrap import TextWrapper
from typing import Any

import msgspec
import pytest

from tests.support.vllm_versions import installed_vllm
from tokenyard.client.build import RequestBuilder
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.sampling import REFUSED, TAKEN
from tokenyard.protocol.wire import Refused, RepetitionDetection, SamplingParams, StructuredOutputs

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_environment")]

lists_of_0_32 = pytest.mark.skipif(
    installed_vllm() < (0, 32), reason="the lists are those of vLLM 0.32"
)


def test_every_parameter_exists_in_vllm_with_the_same_default() -> None:
    import vllm

    from worker.engines.vllm import params as vllm_params

    theirs = {field.name: field.default for field in msgspec.structs.fields(vllm.SamplingParams)}
    ours = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    ours.pop("detokenize")  # unset: it depends on whether the prompt was text
    for name in vllm_params._UNKNOWN:
        ours.pop(name)

    assert ours == {name: theirs[name] for name in ours}


@lists_of_0_32
def test_each_parameter_of_vllm_is_served_or_refused_on_purpose() -> None:
    """A new parameter of vLLM fails here until `tokenyard.protocol.sampling` has it."""
    import vllm

    theirs = {name for name in vllm.SamplingParams.__struct_fields__ if not name.startswith("_")}

    assert theirs == TAKEN.keys() | REFUSED.keys()
    assert not TAKEN.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_parameter_is_refused_with_its_reason(name: str) -> None:
    fields = {b"id": b"a", b"prompt": b"b", b"params": msgspec.json.encode({name: 1})}
    parsed = parse_request(fields)

    assert isinstance(parsed, Refused)
    assert parsed.message == f"params.{name}: is not taken: {REFUSED[name]}"
    with pytest.raises(InvalidRequest, match=f"params.{name}: is not taken: "):
        RequestBuilder("me", None).prepare("text", {name: 1})


def test_a_parameter_missing_in_the_installed_version_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given a vLLM without two of the parameters, only requests that use them are refused."""
    import vllm

    from worker.engines.vllm import params as vllm_params

    missing = vllm_params._UNKNOWN | {"watermarking", "stream_interval"}
    monkeypatch.setattr(vllm_params, "_UNKNOWN", missing)
    monkeypatch.setattr(vllm_params, "_NOT_GIVEN", missing | vllm_params._WITHOUT_EFFECT)

    made = vllm_params.build_params(SamplingParams(top_k=3), streams=False, detokenize=True)
    asked = SamplingParams(stream_interval=3)
    with pytest.raises(InvalidRequest) as refused:
        vllm_params.build_params(asked, streams=True, detokenize=True)

    assert made.top_k == 3
    assert refused.value.field == "params.stream_interval"
    assert f"vLLM {vllm.__version__}" in refused.value.message


def test_every_repetition_detection_field_exists_in_vllm_with_the_same_default() -> None:
    from vllm.sampling_params import RepetitionDetectionParams

    theirs = {field.name: field.default for field in dataclasses.fields(RepetitionDetectionParams)}

    assert theirs == {f.name: f.default for f in msgspec.structs.fields(RepetitionDetection)}


def table_of(head: str, what: str, told: dict[str, str]) -> list[str]:
    """A row for each text that says more than "as in vLLM", with the names that share it."""
    rows: dict[str, list[str]] = {}
    for name, text in told.items():
        rows.setdefault(text, []).append(f"`{name}`")
    rows.pop("as in vLLM", None)
    lines = [f"| {', '.join(names)} | {text} |" for text, names in rows.items()]
    return ["", f"| {head} | {what} |", "|---|---|", *lines]


@lists_of_0_32
def test_the_table_of_the_docs_is_current(request: pytest.FixtureRequest) -> None:
    """With TOKENYARD_WRITE_DOCS=1 this test writes docs/parity.md."""
    import vllm

    page = request.config.rootpath / "docs" / "parity.md"
    begin, end = "<!-- sampling: begin -->", "<!-- sampling: end -->"
    text = page.read_text()
    before, _, rest = text.partition(begin)
    table, _, after = rest.partition(end)
    assert after, f"{page} has no {begin} and {end}"
    names = [name for name in vllm.SamplingParams.__struct_fields__ if not name.startswith("_")]
    plain = ", ".join(f"`{name}`" for name in names if TAKEN.get(name) == "as in vLLM")
    wanted = "\n".join(
        [
            "",
            "",
            *TextWrapper(100, break_on_hyphens=False).wrap(f"Taken as in vLLM: {plain}."),
            *table_of("taken", "how", {n: TAKEN[n] for n in names if n in TAKEN}),
            *table_of("refused", "why", {n: REFUSED[n] for n in names if n in REFUSED}),
            "",
            "",
        ]
    )
    if os.environ.get("TOKENYARD_WRITE_DOCS") == "1":
        page.write_text(f"{before}{begin}{wanted}{end}{after}")
        return

    assert table == wanted, "rewrite it as the page says"


def test_every_constraint_exists_in_vllm_with_the_same_default() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    theirs = {field.name: field.default for field in dataclasses.fields(StructuredOutputsParams)}
    ours = {field.name: field.default for field in msgspec.structs.fields(StructuredOutputs)}

    assert ours == {name: theirs[name] for name in ours}


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"n": 0},
    {"n": -1},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"temperature": -0.1},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"max_tokens": 0},
    {"min_tokens": -1},
    {"min_tokens": 17},
    {"stop": [""]},
    {"bad_words": [""]},
    {"logprobs": -2},
    {"prompt_logprobs": -2},
    {"thinking_token_budget": -2},
    {"stream_interval": 0},
]


@pytest.mark.parametrize("params", OUT_OF_RANGE, ids=str)
def test_values_out_of_vllms_range_are_refused_by_name(params: dict[str, Any]) -> None:
    import vllm

    name = next(iter(params))
    with pytest.raises(Exception, match=name):
        vllm.SamplingParams(**params)

    assert _refused_field(params) == f"params.{name}"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_k": -1},
        {"top_p": 1.0},
        {"min_p": 1.0},
        {"presence_penalty": -2.0},
        {"seed": -(2**63)},
        {"max_tokens": None},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"stop": "a"},
        {"stop": ["a", "b"]},
        {"n": 64},
        {"seed": -1},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"thinking_token_budget": -1},
        {"repetition_detection": RepetitionDetection(max_pattern_size=2, min_count=2)},
        {"extra_args": {"a": [1, {"b": None}]}},
        {"skip_reading_prefix_cache": False},
    ],
    ids=str,
)
def test_both_accept_the_edges_of_the_range(params: dict[str, Any]) -> None:
    from worker.engines.vllm.params import build_params

    assert _refused_field(params) is None
    build_params(SamplingParams(**params), streams=False, detokenize=True)


def _refused_field(params: dict[str, Any]) -> str | None:
    """The field named in the refusal of a request with these parameters.

    Refused by the parser, as in the coordinator; otherwise by vLLM's checks, as in the worker.
    """
    from worker.engines.vllm.params import build_params

    parsed = parse_request({b"id": b"a", b"prompt": b"b", b"params": msgspec.json.encode(params)})
    if isinstance(parsed, Refused):
        return parsed.message.partition(":")[0]
    try:
        build_params(parsed.params, streams=False, detokenize=True)
    except InvalidRequest as refused:
        return refused.field
    return None
