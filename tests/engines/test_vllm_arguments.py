"""A `ModelSpec` as vLLM's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.harness import spec_of
from worker.engines.vllm_environment import engine_environment, set_environment

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    set_environment(engine_environment(cpu=True))


def test_a_step_takes_as_many_tokens_as_in_vllms_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from worker.engines.vllm_arguments import engine_config

    asked: list[Any] = []
    create = EngineArgs.create_engine_config

    def remember(self: EngineArgs, usage_context: UsageContext | None = None) -> Any:
        asked.append(usage_context)
        return create(self, usage_context)

    monkeypatch.setattr(EngineArgs, "create_engine_config", remember)

    engine_config(spec_of("adder"), 0)

    assert asked == [UsageContext.OPENAI_API_SERVER]


def test_what_the_operator_says_of_a_step_counts() -> None:
    from worker.engines.vllm_arguments import engine_config

    config = engine_config(spec_of("adder", engine_args={"max_num_batched_tokens": 640}), 0)

    assert config.scheduler_config.max_num_batched_tokens == 640
