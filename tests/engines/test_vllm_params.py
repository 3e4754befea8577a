"""Parameters that many requests share are built once, and no request changes them for another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.harness import ask, run
from tokenyard.protocol.wire import SamplingParams, StructuredOutputs
from worker.engines import Engine
from worker.engines.vllm.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_environment")]


def make(maker: Any, params: SamplingParams, streams: bool = False, **changes: Any) -> Any:
    return maker.make(params, streams, True, changes)


def test_equal_parameters_are_built_once() -> None:
    from worker.engines.vllm.params import ParamsMaker

    maker = ParamsMaker()
    first, second = (SamplingParams(temperature=0.5, max_tokens=3) for _ in range(2))

    assert make(maker, first) is make(maker, second)
    assert make(maker, first) is not make(maker, second, streams=True)
    assert make(maker, first).max_tokens == 3


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        (SamplingParams(structured_outputs=StructuredOutputs(regex="a")), {}),
        (SamplingParams(stop=["x"]), {}),
        (SamplingParams(), {"seed": 7}),
    ],
    ids=["a constraint", "lists", "a change"],
)
def test_parameters_of_a_single_request_are_built_for_it(
    params: SamplingParams, changes: dict[str, Any]
) -> None:
    from worker.engines.vllm.params import ParamsMaker

    maker = ParamsMaker()

    made = [make(maker, params, **changes) for _ in range(2)]

    assert made[0] is not made[1]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=None),
        SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2),
        SamplingParams(temperature=0.0, n=1, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=1.0, n=2, max_tokens=3),
    ],
    ids=["unbounded", "at least", "past the end", "two choices"],
)
def test_a_request_leaves_shared_parameters_unchanged(
    vllm_engine: Engine, params: SamplingParams
) -> None:
    from worker.engines.vllm.params import build_params

    assert isinstance(vllm_engine, VllmEngine)
    shared = vllm_engine._params.make(params, False, True, {})
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    del given["detokenize"]

    run(vllm_engine, ask(prompt="12+34=", **given), ask("2-0", prompt="1+2=", **given))

    assert vllm_engine._params.make(params, False, True, {}) is shared
    fresh = build_params(params, streams=False, detokenize=True)
    changed = {
        name for name in shared.__struct_fields__ if getattr(shared, name) != getattr(fresh, name)
    }
    assert changed <= {"_all_stop_token_ids"}  # the model's end tokens, the same for all
