"""How the grammars of constraints on the text are bounded and compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_clock import FakeClock
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import SamplingParams, StructuredOutputs
from worker.engines.vllm.grammars import GrammarLimits, GrammarThreads, check_grammar


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    """What a compilation waits for that does not end in the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def threads() -> GrammarThreads:
    return GrammarThreads(GrammarLimits(max_bytes=100, timeout_s=10.0))


def begin(threads: GrammarThreads, key: str, function: Any, *arguments: Any) -> Future[Any]:
    threads.key = key
    return threads.submit(function, *arguments)


def test_a_grammar_does_not_wait_for_one_that_takes_forever(
    threads: GrammarThreads, forever: threading.Event, fake_clock: FakeClock
) -> None:
    slow = [begin(threads, f"1-{number}", forever.wait) for number in range(8)]
    quick = begin(threads, "2-0", str.upper, "a")

    assert quick.result(60) == "A"
    assert not any(one.done() for one in slow)
    assert threads.refused() == {}
    assert threads.is_compiling


def test_the_request_of_a_grammar_that_takes_too_long_is_refused_once(
    threads: GrammarThreads, forever: threading.Event, fake_clock: FakeClock
) -> None:
    late = begin(threads, "1-0", forever.wait)
    fake_clock.advance(6)
    begin(threads, "2-0", forever.wait)
    fake_clock.advance(6)

    why = "takes more than 10 s to compile (grammar_timeout_s)"
    assert threads.refused() == {"1-0": why}
    assert threads.refused() == {}
    assert not late.done()


def test_a_grammar_that_cannot_be_compiled_is_no_error_of_vllms(threads: GrammarThreads) -> None:
    grammar = begin(threads, "1-0", int, "no number")
    for thread in threading.enumerate():
        if thread.name == "grammar":
            thread.join(60)

    (why,) = threads.refused().values()
    assert why.startswith("cannot be compiled: invalid literal for int()")
    assert not grammar.done()


def test_a_process_and_its_unload_do_not_wait_for_a_grammar(
    threads: GrammarThreads, forever: threading.Event
) -> None:
    begin(threads, "1-0", forever.wait)
    threads.shutdown(wait=True, cancel_futures=True)

    (thread,) = [one for one in threading.enumerate() if one.name == "grammar"]
    assert thread.daemon


def test_a_process_whose_grammars_never_end_is_told_apart(
    threads: GrammarThreads, forever: threading.Event, fake_clock: FakeClock
) -> None:
    begin(threads, "1-0", forever.wait)
    begin(threads, "2-0", str.upper, "a").result(60)
    fake_clock.advance(90)
    threads.refused()
    threads.forget("2-0")
    assert not threads.is_stuck

    fake_clock.advance(20)

    assert threads.is_stuck


def test_an_engine_without_a_tokenizer_compiles_nothing(threads: GrammarThreads) -> None:
    manager = SimpleNamespace()
    core = SimpleNamespace(structured_output_manager=manager)
    threads.stand_in(SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))
    assert not vars(manager)


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutputs(json={"enum": ["a" * 20] * 5}),
        StructuredOutputs(json="a" * 101),
        StructuredOutputs(choice=["a"] * 40),
        StructuredOutputs(regex="a" * 101),
        StructuredOutputs(grammar="a" * 101),
        StructuredOutputs(structural_tag="a" * 101),
        StructuredOutputs(json="{}", whitespace_pattern="a" * 101),
    ],
    ids=lambda one: next(name for name in one.__struct_fields__ if getattr(one, name)),
)
def test_a_constraint_has_a_largest_size(
    threads: GrammarThreads, constraint: StructuredOutputs
) -> None:
    with pytest.raises(InvalidRequest, match=r"at most 100 are taken") as refused:
        check_grammar(SamplingParams(structured_outputs=constraint), threads._limits)
    assert refused.value.field == "params.structured_outputs"


def test_smaller_constraints_and_none_are_taken(threads: GrammarThreads) -> None:
    check_grammar(SamplingParams(), threads._limits)
    check_grammar(
        SamplingParams(structured_outputs=StructuredOutputs(regex="a" * 80)), threads._limits
    )
