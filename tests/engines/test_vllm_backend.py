"""A warm process: models come and go, and it stays as it was."""

from __future__ import annotations

import gc
import json
import pickle
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.harness import MODELS, ask, core_of, run, spec_of
from tests.engines.llama import write_llama
from tests.engines.on_cpu import needs_cpu
from worker.engines import Backend, Engine
from worker.engines.vllm.backend import run_first_model
from worker.engines.vllm.engine import VllmEngine
from worker.models import ModelSpec

pytestmark = pytest.mark.vllm

MIB = 1024**2
QUESTION = {"adder": ("12+34=", "46"), "subtractor": ("46-12=", "34")}


def check(engine: Engine, model: str = "adder") -> None:
    """Check that the engine calculates."""
    prompt, answer = QUESTION[model]
    (outcome,) = run(engine, ask(prompt=prompt, temperature=0.0))
    assert outcome.choice.text == answer


def test_the_warm_up_reports_the_time_of_each_phase(
    warm: Backend, warm_phases_s: dict[str, float]
) -> None:
    assert list(warm_phases_s) == ["import", "device", "heap", "first model"]
    assert warm_phases_s["first model"] > 0


def test_nothing_heavy_is_imported_before_the_warm_up() -> None:
    code = (
        "import sys\n"
        "from tokenyard.protocol.settings import WorkerSettings\n"
        "from worker.engines.loading import make_backend, make_core_backend, prepare_host\n"
        "settings = WorkerSettings(redis_url='redis://nowhere', model='any')\n"
        "prepare_host(settings)\n"
        "make_backend(settings, '/nowhere')\n"
        "make_core_backend(settings, 0)\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"


def test_a_warm_up_succeeds_even_if_its_model_does_not_run(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of("adder", MODELS / "nowhere")
    monkeypatch.setattr("worker.engines.vllm.made_up_model.write_model", lambda _: spec)

    run_first_model(backend)

    assert "no model runs in the warm-up" in caplog.text
    engine = backend.load(spec_of("adder"))
    check(engine)
    engine.close()


# ------------------------------------------------------------------------------- load and unload


def test_models_take_turns_and_the_memory_returns(backend: Backend, tmp_path: Path) -> None:
    # Given a process that has held a model of 20 MiB and its KV cache
    large = write_llama(tmp_path / "large", layers=2)
    backend.load(spec_of("large", large)).close()
    before = backend.memory()

    # If other models and this one take turns
    for turn in range(4):
        for model in QUESTION:
            engine = backend.load(spec_of(model))
            assert engine.info.model == model
            check(engine, model)
            engine.close()
        backend.load(spec_of(f"large-{turn}", large)).close()

    # I expect less to stay than one model or one KV cache takes.
    after = backend.memory()
    assert after.host - before.host < 5 * MIB
    assert (after.device or 0) - (before.device or 0) < 5 * MIB


def test_the_objects_of_an_engine_are_collected(backend: Backend) -> None:
    frozen = gc.get_freeze_count()
    engine = backend.load(spec_of("adder"))
    assert isinstance(engine, VllmEngine)
    inner, core = weakref.ref(engine._open()), weakref.ref(core_of(engine)._open())

    engine.close()

    # I expect the base to be frozen as before, without any object of the engine.
    assert (inner(), core()) == (None, None)
    assert 0 < gc.get_freeze_count() <= frozen
    assert gc.freeze.__name__ == "freeze"
    assert gc.unfreeze.__name__ == "unfreeze"


def test_what_a_core_tells_its_front_is_small(backend: Backend) -> None:
    engine = backend.load(spec_of("adder", kv_cache_gib=0.125))
    told = pickle.dumps(core_of(engine).info)
    engine.close()

    assert len(told) < 100_000, "neither weights nor the KV cache are in it"


def test_torch_does_not_change_how_python_reports_faults(backend: Backend) -> None:
    before = sys.excepthook

    backend.load(spec_of("adder")).close()

    assert sys.excepthook is before


def test_a_compiled_model_is_collected_with_its_engine(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # traced as usual, but not compiled for a minute
    engine = backend.load(spec_of("adder", enforce_eager=False))
    (model,) = core_of(engine)._open().collective_rpc(_model)
    check(engine)

    engine.close()

    assert model() is None


@needs_cpu
def test_the_kv_cache_is_no_larger_than_all_sequences_can_fill(backend: Backend) -> None:
    def cache_bytes(spec: ModelSpec) -> int:
        engine = backend.load(spec)
        found = core_of(engine)._open().collective_rpc(_cache_bytes)[0]
        check(engine)
        engine.close()
        return found

    few, many = (cache_bytes(spec_of("adder", max_num_seqs=count)) for count in (4, 64))
    told = cache_bytes(spec_of("adder", kv_cache_gib=0.125))

    # One sequence takes a block of 128 tokens, 2 KiB each.
    assert few == 5 * 128 * 2048
    assert many == 65 * 128 * 2048
    assert told == 128 * MIB


def _model(worker: Any) -> weakref.ref[Any]:
    return weakref.ref(worker.get_model().model)


def _cache_bytes(worker: Any) -> int:
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# ------------------------------------------------------------------------------------- faults


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _with(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50_000])


def _configured(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


@pytest.mark.parametrize(
    ("mark_broken", "fields"),
    [
        (shutil.rmtree, {}),
        (_without("config.json"), {}),
        (_with("config.json", b"{"), {}),
        (_without("model.safetensors"), {}),
        (_with("tokenizer.json", b"{"), {}),
        (_cut, {}),
        (_configured(hidden_size=256), {}),
        (_configured(num_hidden_layers=3), {}),
        (_configured(architectures=["Nonsense"]), {}),
        (_configured(vocab_size=10**10), {}),
        (None, {"kv_cache_gib": 1e6}),
        (None, {"kv_cache_gib": 1e-6}),
        (None, {"max_model_len": 10**6}),
        (None, {"quantization": "nonsense"}),
        (None, {"engine_args": {"nonsense": 1}}),
        (None, {"tensor_parallel_size": 2}),
    ],
    ids=[
        "no folder",
        "no config",
        "broken config",
        "no weights",
        "broken tokenizer",
        "cut weights",
        "other width",
        "missing layer",
        "unknown architecture",
        "too large for the memory",
        "cache too large",
        "cache too small",
        "too long",
        "unknown quantization",
        "unknown argument",
        "ranks without a group",
    ],
)
def test_a_model_that_cannot_be_loaded_leaves_the_process_warm(
    backend: Backend,
    tmp_path: Path,
    mark_broken: Callable[[Path], object] | None,
    fields: dict[str, object],
) -> None:
    from torch import distributed

    folder = tmp_path / "broken"
    shutil.copytree(MODELS / "adder", folder)
    if mark_broken is not None:
        mark_broken(folder)

    with pytest.raises(Exception, match=r"\w{3}"):
        backend.load(spec_of("broken", folder, **fields))

    assert not distributed.is_initialized()
    engine = backend.load(spec_of("adder"))
    check(engine)
    engine.close()


def test_a_failed_load_keeps_none_of_the_weights(backend: Backend, tmp_path: Path) -> None:
    # Given a model of 40 MiB without one layer, and a process that has tried it once
    folder = write_llama(tmp_path / "cut", layers=4)
    _configured(num_hidden_layers=5)(folder)

    def try_it() -> int:
        with pytest.raises(ValueError, match=r"layers\.4"):
            backend.load(spec_of("cut", folder))
        return backend.memory().host

    first = try_it()
    later = [try_it() for _ in range(4)]

    # One that kept them would have more each time; what else the process does comes and goes.
    assert min(later) - first < 10 * MIB
