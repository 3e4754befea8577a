"""A `ModelSpec` as vLLM's configuration."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.harness import spec_of
from worker.host.diagnosis import FailedStart, diagnose
from worker.models import AdapterSpec

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_environment")]


def test_a_step_takes_as_many_tokens_as_in_vllms_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from worker.engines.vllm.arguments import engine_config

    asked: list[Any] = []
    create = EngineArgs.create_engine_config

    def remember(self: EngineArgs, usage_context: UsageContext | None = None) -> Any:
        asked.append(usage_context)
        return create(self, usage_context)

    monkeypatch.setattr(EngineArgs, "create_engine_config", remember)

    engine_config(spec_of("adder"), 0)

    assert asked == [UsageContext.OPENAI_API_SERVER]


def test_a_table_of_the_models_file_becomes_vllms_configuration() -> None:
    from vllm.config import ReasoningConfig

    from worker.engines.vllm.arguments import _nested

    marks = {"reasoning_start_str": "1", "reasoning_end_str": "2"}
    # vLLM writes the parser into it before it would convert a table.
    made = _nested(spec_of("adder", engine_args={"reasoning_config": marks}))
    assert made == {"reasoning_config": ReasoningConfig(**marks)}


def test_the_operators_step_size_counts() -> None:
    from worker.engines.vllm.arguments import engine_config

    config = engine_config(spec_of("adder", engine_args={"max_num_batched_tokens": 640}), 0)

    assert config.scheduler_config.max_num_batched_tokens == 640


def test_a_package_that_a_model_needs_is_named(tmp_path: Path) -> None:
    """As torchvision for a model of vision, which vLLM's error does not name."""
    from vllm import ModelRegistry

    from worker.engines.vllm.arguments import engine_config

    spec = spec_of("adder")
    config = json.loads(Path(spec.path, "config.json").read_text())
    for file in Path(spec.path).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Sees"]}))
    ModelRegistry.register_model("Sees", "no_such_package:Sees")

    with pytest.raises(ValueError, match="import the model's class") as caught:
        engine_config(replace(spec, path=str(tmp_path)), 0)

    said = f"ValueError: {caught.value}"
    diagnosis = diagnose(FailedStart("loading the model", said=said, model=spec.path))
    assert diagnosis.cause == "a Python package is missing"
    assert "pip install no_such_package" in diagnosis.remedy


def test_an_error_of_several_lines_is_shown_from_its_first() -> None:
    """As transformers', whose last line only says that a restart may be needed."""
    from worker.engines.vllm.arguments import _reasons_named

    said = "Traceback (most recent call last):\n  File x\nImportError: X requires the Y library.\n"
    log = logging.getLogger("vllm.model_executor.models.registry")

    @_reasons_named()
    def inspect() -> None:
        log.error("no class", exc_info=RuntimeError(said + "Please note that you may restart."))
        raise ValueError("failed to be inspected")

    with pytest.raises(ValueError, match="class: ImportError: X requires the Y"):
        inspect()


GIB = 1024**3


@pytest.mark.parametrize(
    ("free_gib", "asked"),
    [
        (79.0, 0.92),  # no other process is there: vLLM's own share
        (70.0, 0.835),  # other processes wait or sleep there
        (4.0, 0.01),
        (1.0, 0.001),  # vLLM reports that it does not suffice
        (0.0, 0.001),
    ],
)
def test_an_engine_asks_for_no_more_memory_than_is_free(free_gib: float, asked: float) -> None:
    from worker.engines.vllm.arguments import utilization

    assert utilization(int(free_gib * GIB), 80 * GIB, 0.92) == asked


def test_an_engine_takes_the_free_memory_of_a_gpu_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from vllm.platforms import current_platform

    from worker.engines.vllm.arguments import _memory

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((70 - device) * GIB, 80 * GIB))

    alone = _memory(spec_of("adder"), 6)
    fixed = _memory(spec_of("adder", kv_cache_gib=2.0), 6)

    assert alone["gpu_memory_utilization"] == 0.76
    assert fixed["gpu_memory_utilization"] == 0.76
    assert fixed["kv_cache_memory_bytes"] == 2 * GIB
    assert "gpu_memory_utilization" not in _memory(spec_of("adder"), None), "in a group"


@pytest.mark.parametrize(
    ("dtype", "adapters", "on_gpu", "on_cpu"),
    [
        ("float32", 1, "auto", "float32"),
        ("float", 1, "auto", "float"),
        ("float32", 0, "float32", "float32"),
        ("float16", 1, "float16", "float16"),
    ],
)
def test_adapters_on_a_gpu_take_sixteen_bits(
    dtype: str, adapters: int, on_gpu: str, on_cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    from worker.engines.vllm.arguments import _dtype

    spec = spec_of("adder", dtype=dtype, adapters=(AdapterSpec("a", "nowhere"),) * adapters)

    assert _dtype(spec) == on_cpu
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert _dtype(spec) == on_gpu
