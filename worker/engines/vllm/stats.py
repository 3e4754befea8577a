"""Reads vLLM's own metrics in this process.

An `LLMEngine` with log stats on keeps them in the default registry of `prometheus_client`, and each
engine registers them again. This module imports nothing heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from worker.messages import EngineMetric

_PREFIX: Final = "vllm:"


def read_stats() -> Sequence[EngineMetric]:
    """The current metrics; empty before the first engine with log stats. Thread-safe."""
    library = sys.modules.get("prometheus_client")
    if library is None:
        return ()
    return [
        EngineMetric(
            family.name,
            family.type,
            family.documentation,
            [
                (one.name, tuple(sorted(one.labels.items())), one.value)
                for one in family.samples
                if not one.name.endswith("_created")  # start times, not measurements
            ],
        )
        for family in library.REGISTRY.collect()
        if family.name.startswith(_PREFIX)
    ]
