"""Whether a process leaks, by its memory after each unload."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from worker.engines import Memory
from worker.host.leak import READINGS, MemoryHistory, MemoryReading, Verdict, growth

MIB = 1024**2
WARM = 590
#: Resident MiB of a healthy process after unloads of two small models in turn, as measured.
PLATEAU = (604, 617, 609, 621, 613, 632, 618, 626, 611, 629, 620, 615, 628, 607, 623, 619)


def judged(
    values_mib: Sequence[float], warm_mib: float = WARM, took_mib: float = 0, **allowed: float
) -> list[Verdict]:
    """The verdict after each unload."""
    history = MemoryHistory(**allowed)
    history.note_warm(Memory(round(warm_mib * MIB)))
    found = []
    for value in values_mib:
        history.readings.append(MemoryReading(round(value * MIB), round(took_mib * MIB)))
        found.append(history.verdict)
    return found


def is_sound(values_mib: Sequence[float], warm_mib: float = WARM, took_mib: float = 0) -> bool:
    return set(judged(values_mib, warm_mib, took_mib)) == {Verdict.SOUND}


def first(verdict: Verdict, values_mib: Sequence[float], took_mib: float = 0) -> int:
    """The number of unloads until this verdict."""
    return judged(values_mib, took_mib=took_mib).index(verdict) + 1


def test_a_healthy_plateau_is_no_leak() -> None:
    assert is_sound(PLATEAU)


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_2_to_7_percent_is_no_leak(seed: int) -> None:
    draw = random.Random(seed)
    kept = [WARM * (1 + draw.uniform(0.022, 0.066)) for _ in range(125)]

    assert is_sound(kept)


@pytest.mark.parametrize("caches", [30, 300])
def test_caches_that_the_first_models_fill_are_no_leak(caches: int) -> None:
    """Given growth of any size that stops, immediately or after a few models."""
    at_once = [WARM + caches] * 12
    slowly = [WARM + caches * share for share in (0.5, 0.8, 0.95, 1, 1, 1, 1, 1, 1, 1, 1)]

    assert is_sound(at_once)
    assert is_sound(slowly)


def test_workspaces_over_a_tiny_baseline_are_no_leak() -> None:
    """Given a GPU with 2 MiB reserved by torch, and some 30 MiB after the first model."""
    assert is_sound([32, 32, 34, 34, 34, 34, 34, 34, 34], warm_mib=2)


@pytest.mark.parametrize("noise", [0, 14])
@pytest.mark.parametrize("step", [16, 50, 200])
def test_steady_growth_is_found_after_a_few_models(step: int, noise: int) -> None:
    draw = random.Random(step)
    values = [WARM + at * step + draw.uniform(-noise, noise) for at in range(1, 3 * READINGS)]

    found = first(Verdict.GROWING, values)

    assert found == READINGS or (noise and found <= 2 * READINGS)


def test_slow_growth_is_found_once_it_is_large() -> None:
    """Given 5 MiB with each model, invisible after six of them: a GiB in the end."""
    values = [WARM + 5 * at for at in range(1, 300)]

    assert 1024 / 5 <= first(Verdict.GROWING, values) <= 1024 / 5 + READINGS


def test_growth_of_the_heap_over_thousands_of_requests_is_no_leak() -> None:
    """Given 20 % after eight models with a thousand requests each, and then less and less."""
    values = [WARM * (1 + 0.2 * (at / 8) ** 0.4) for at in range(1, 200)]

    assert is_sound(values)


def test_growth_after_a_plateau_is_found() -> None:
    values = [*PLATEAU, *(PLATEAU[-1] + 20 * at for at in range(1, 10))]

    assert len(PLATEAU) < first(Verdict.GROWING, values) <= len(PLATEAU) + READINGS


def test_a_single_outlier_is_no_growth() -> None:
    assert is_sound([*PLATEAU[:8], 900, *PLATEAU[8:]])


def test_a_model_that_stays_in_memory_is_found_immediately() -> None:
    values = [604, 604, 604 + 9_000, 604 + 9_000]

    assert first(Verdict.GROSS, values, took_mib=16_000) == 3
    assert first(Verdict.GROSS, [WARM + 9_000], took_mib=16_000) == 1


def test_a_small_remainder_is_no_leak_even_of_a_small_model() -> None:
    """Given a tiny model of which most stays the first time: caches."""
    assert is_sound([WARM + 40] * 6, took_mib=60)


def test_the_allowed_growth_is_the_larger_of_share_and_floor() -> None:
    values = [WARM + 10 * at for at in range(1, READINGS + 1)]
    assert growth(values) == pytest.approx(50)

    for tolerance, floor_mib, verdict in (
        (0.0, 49.0, Verdict.GROWING),
        (0.0, 51.0, Verdict.SOUND),
        (0.05, 0.0, Verdict.GROWING),
        (0.10, 0.0, Verdict.SOUND),
    ):
        assert judged(values, tolerance=tolerance, floor_mib=floor_mib)[-1] is verdict


def test_too_few_measurements_give_no_verdict() -> None:
    assert is_sound([WARM + at * 1000 for at in range(READINGS - 1)])
