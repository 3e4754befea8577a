"""How the durability benchmark evaluates its times."""

from __future__ import annotations

import pytest

from benchmarks.durability import BURST, Case, Sample, figures


def test_figures_are_medians_of_the_rounds() -> None:
    rounds = [
        Sample([0.001, 0.002, 0.009], [0.1, 0.3]),  # 2 ms, 500/s
        Sample([0.004], [0.1]),  # 4 ms, 1000/s
        Sample([0.003], [0.05]),  # 3 ms, 2000/s
    ]
    case: Case = ("always", "disk")
    assert BURST == 100

    assert figures({case: rounds}) == {
        "always_disk_p50_ms": pytest.approx(3.0),
        "always_disk_per_s": pytest.approx(1000.0),
    }
