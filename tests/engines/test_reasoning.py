"""Constraints on the text begin where the reasoning ends, as the request tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.engines.harness import greedy, refused_field, run, spec_of
from tokenyard.protocol.wire import Assignment, StructuredOutputs
from worker.engines import Backend, Engine

pytestmark = pytest.mark.vllm

FOUR, PLUS = 8, 14  # "4", which the adder answers first to "12+34=", and "+"
ONLY_PLUS = {"structured_outputs": StructuredOutputs(regex=r"\+{3}"), "max_tokens": 4}


@pytest.fixture(scope="module")
def parser() -> str:
    """A parser whose reasoning ends at the token ``end``, by default "4"."""
    from vllm.reasoning import ReasoningParser, ReasoningParserManager

    class EndsAtToken(ReasoningParser):
        def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(tokenizer, *args, **kwargs)
            self._end = int(kwargs.get("chat_template_kwargs", {}).get("end", FOUR))

        def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
            return self._end in input_ids

        def extract_content_ids(self, input_ids: list[int]) -> list[int]:
            return input_ids

        def extract_reasoning(self, model_output: str, request: Any) -> tuple[None, str]:
            return None, model_output

        def extract_reasoning_streaming(self, *_: Any, **__: Any) -> None:
            return None

    ReasoningParserManager.register_module("ends_at_token", module=EndsAtToken)
    return "ends_at_token"


@pytest.fixture
def reasoner(backend: Backend, parser: str) -> Iterator[Engine]:
    engine = backend.load(spec_of("adder", serve_args={"reasoning_parser": parser}, sleep_level=0))
    yield engine
    engine.close()


def told(ended: bool | None = None, key: str = "1-0", **kwargs: Any) -> Assignment:
    assignment = greedy(key, **ONLY_PLUS, ignore_eos=False)
    request = replace(assignment.request, reasoning_ended=ended, reasoning_parser_kwargs=kwargs)
    return replace(assignment, request=request)


def test_a_constraint_begins_where_the_reasoning_ends(reasoner: Engine) -> None:
    (ended,) = run(reasoner, told(ended=True))
    (goes_on,) = run(reasoner, told(ended=False))
    (at_plus,) = run(reasoner, told(chat_template_kwargs={"end": PLUS}))
    (never,) = run(reasoner, told(ended=False, chat_template_kwargs={"end": 12}))

    assert ended.tokens[:3] == [PLUS] * 3
    assert goes_on.tokens[:3] == [FOUR, PLUS, PLUS]
    assert at_plus.tokens[:3] == [PLUS] * 3, "it stands in the prompt"
    assert PLUS not in never.tokens

    # Given arguments at which the parser fails, which it would in the middle of a step
    for kwargs in ({"chat_template_kwargs": {"end": "x"}}, {"tokenizer": 1}):
        assert refused_field(reasoner, told(**kwargs)) == "reasoning_parser_kwargs"
    (after,) = run(reasoner, told(ended=True))
    assert after.tokens == ended.tokens


def test_without_a_parser_it_has_no_effect(vllm_engine: Engine) -> None:
    (outcome,) = run(vllm_engine, told(ended=False, tokenizer=1))

    assert outcome.tokens[:3] == [PLUS] * 3
