"""Load, unload, swap, sleep and wake: same answers, and the device gets its memory back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.llama import Family, counted
from tests.gpu.conftest import Figures
from tests.gpu.device import GIB, MIB, Device
from tests.gpu.local import PROMPTS, TOKENS, Local, answers
from tests.gpu.specs import FAMILIES, bounded, spec_of
from worker import EngineHandle, ModelSpec

pytestmark = bounded(330)

EXPECTED = [counted(prompt, TOKENS) for prompt in PROMPTS]


@pytest.fixture
def spec(device: Device, models: Path, family: Family) -> ModelSpec:
    """A model of random weights, all of which affect its answers."""
    return spec_of(device, family, models / family)


def reserved(local: Local) -> list[int]:
    """Bytes that each process keeps beyond those of its first warm state."""
    found = local.controller.status()
    return [one.memory.scarce - one.baseline.scarce for one in found if one.memory and one.baseline]


def taken(local: Local, before: int) -> int:
    return local.used() - before


def check_warm(local: Local, before: int, slack: int) -> None:
    """Check that every process is warm and holds what it held before."""
    assert {one.state for one in local.controller.status()} == {"warm"}, local.told()
    local.wait_used_at_most(before + slack)


def one_life(local: Local, spec: ModelSpec) -> list[list[int]]:
    """Load a model, ask it, and unload it."""
    with local.controller.create(spec) as engine:
        return answers(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_and_goes(
    local: Local, device: Device, figures: Figures, spec: ModelSpec, family: Family
) -> None:
    cache = int(device.kv_cache_gib * GIB)
    empty = local.used()

    # If a model is loaded for the first time
    with local.controller.create(spec) as engine:
        first = answers(engine)
        size = taken(local, empty)
        phases_s = dict(engine.phases_s)
    once = local.wait_used_at_most(empty + device.once) - empty

    # I expect it to take its cache, and to leave the process warm; and each later time
    assert size > 0.9 * cache, f"{size / MIB:.0f} MiB"
    check_warm(local, empty, device.once)
    before = local.used()
    again = [one_life(local, spec) for _ in range(3)]

    # the same answers, and nothing more left behind.
    assert again == [first] * 3
    check_warm(local, before, device.slack)
    figures.note(
        f"life_{family}",
        {
            "load_s": phases_s,
            "took_mib": size >> 20,
            "first_left_mib": once >> 20,
            "later_left_mib": (local.used() - before) >> 20,
            "reserved_left_mib": [one >> 20 for one in reserved(local)],
        },
    )


def test_models_take_turns(local: Local, device: Device, models: Path, figures: Figures) -> None:
    # Given a process that has held both models
    specs = [spec_of(device, family, models / f"{family}-counts") for family in FAMILIES]
    for spec in specs:
        assert one_life(local, spec) == EXPECTED
    before = local.used()

    # If they take turns
    swaps_s = []
    for _ in range(3):
        for spec in specs:
            with local.controller.create(spec) as engine:
                assert answers(engine) == EXPECTED
                swaps_s.append(sum(engine.phases_s.values()))

    # I expect no memory to stay.
    check_warm(local, before, device.slack)
    figures.note("swap_load_s", swaps_s)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_sleeps_and_wakes(
    local: Local,
    device: Device,
    figures: Figures,
    spec: ModelSpec,
    family: Family,
    level: int,
) -> None:
    cache = int(device.kv_cache_gib * GIB)
    one_life(local, spec)
    empty = local.used()
    with local.controller.create(spec) as engine:
        said = answers(engine)
        awake = taken(local, empty)

        # If it sleeps twice
        asleep, wake_s = [], []
        for _ in range(2):
            engine.sleep(level)
            assert local.process("asleep", spec.name).pid
            asleep.append(taken(local, empty))
            engine.wake()
            assert list(engine.phases_s) == ["wake"]
            wake_s.append(engine.phases_s["wake"])

            # I expect the same answers,
            assert answers(engine) == said
    # the cache to be freed in between, and everything to be freed in the end.
    assert min(awake - one for one in asleep) > 0.9 * cache
    check_warm(local, empty, device.slack)
    figures.note(
        f"sleep_{level}_{family}",
        {
            "awake_mib": awake >> 20,
            "asleep_mib": [one >> 20 for one in asleep],
            "wake_s": wake_s,
        },
    )


def test_several_models_sleep_on_one_device(
    local: Local, device: Device, models: Path, figures: Figures
) -> None:
    """One more than may be awake at a time: each in its own process, woken in turn."""
    cache = int(device.kv_cache_gib * GIB)
    sources = {
        "first": models / FAMILIES[0],
        "second": models / FAMILIES[1],
        "third": models / f"{FAMILIES[0]}-counts",
    }
    specs = [spec_of(device, name, path) for name, path in sources.items()]
    said = {spec.name: one_life(local, spec) for spec in specs}
    empty = local.used()
    engines: list[EngineHandle] = []
    try:
        # Given two that sleep beside one that is awake
        for spec in specs:
            for other in engines[-1:]:
                other.sleep(1)
            engines.append(local.controller.create(spec))
        states = sorted(one.state for one in local.controller.status())
        assert states == ["asleep", "asleep", "ready"], local.told()
        full = taken(local, empty)

        # If each is woken in turn, twice
        awake, wake_s = engines[-1], []
        for _ in range(2):
            for engine in engines:
                awake.sleep(1)
                engine.wake()
                awake = engine
                wake_s.append(engine.phases_s["wake"])

                # I expect its own answers, and no more memory in use than one model takes.
                assert answers(engine) == said[engine.model]
                assert taken(local, empty) < 1.5 * cache + device.once
    finally:
        for engine in engines:
            engine.close()
    check_warm(local, empty, device.once)
    figures.note("sleepers", {"two_asleep_one_awake_mib": full >> 20, "wake_s": wake_s})


@pytest.mark.parametrize("family", FAMILIES[:1])
def test_a_model_loaded_without_sleep_is_unloaded(
    local: Local, device: Device, spec: ModelSpec, family: Family
) -> None:
    if not device.is_gpu:
        pytest.skip("on a CPU every model can sleep")
    empty = local.used()
    with local.controller.create(replace(spec, name=f"{family}-awake", sleep_level=0)) as engine:
        said = answers(engine)

        engine.sleep()

        check_warm(local, empty, device.once)
        engine.wake()
        assert "weights" in engine.phases_s
        assert answers(engine) == said
