"""How many tokens of a prompt vLLM's prefix cache had, as an engine reports it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.engines.harness import ask, run, spec_of
from tests.engines.llama import write_llama
from tokenyard.protocol.wire import Assignment
from worker.engines import Backend

pytestmark = pytest.mark.vllm

BLOCK = 32  # tokens


def with_salt(assignment: Assignment, salt: str, tenant: str = "") -> Assignment:
    request = replace(assignment.request, cache_salt=salt, tenant=tenant)
    return replace(assignment, request=request)


def test_a_repeated_prompt_is_cached_except_for_its_last_block(
    backend: Backend, tmp_path: Path
) -> None:
    # Given a model with blocks of 32 tokens
    path = write_llama(tmp_path / "small", width=64, layers=1)
    spec = spec_of("small", path, engine_args={"block_size": BLOCK}, sleep_level=0)
    engine = backend.load(spec)
    try:
        prompt = list(range(10, 110))
        given = [ask(f"{n}-0", tokens=prompt, max_tokens=4, temperature=0.0) for n in range(2)]

        (first,), (second,) = run(engine, given[0]), run(engine, given[1])
        salted = [
            run(engine, with_salt(ask(f"{n}-1", tokens=prompt, stream=True, max_tokens=4), *whose))[
                0
            ]
            for n, whose in enumerate(
                [("mine",), ("mine",), ("yours",), ("", "acme"), ("", "evil"), ("", "acme")]
            )
        ]
        engine.reload("")
        (third,) = run(engine, ask("3-0", tokens=prompt, max_tokens=4, temperature=0.0))
        holds = engine.info.cache_tokens
    finally:
        engine.close()

    told = [one.finished.cached_tokens for one in (first, second, third) if one.finished]
    assert told == [0, 3 * BLOCK, 0]
    cached = [one.finished.cached_tokens for one in salted if one.finished]
    assert cached == [0, 3 * BLOCK, 0, 0, 0, 3 * BLOCK]
    for one in salted:
        assert one.finished is not None
        cached = [delta.cached_tokens for delta in one.deltas]
        assert cached == [one.finished.cached_tokens] + [None] * (len(cached) - 1)
    assert holds > 0
    assert holds % BLOCK == 0
