"""What vLLM measures of itself: the metrics of its own that this process has registered.

vLLM counts where its `LLMEngine` was made with log stats on, in the default registry of
`prometheus_client`, and makes them all again for each engine. This file imports nothing heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from worker.messages import EngineMetric

_PREFIX: Final = "vllm:"


def read_stats() -> Sequence[EngineMetric]:
    """All of them as they are now; none before the first engine that counts. Any thread may."""
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
                if not one.name.endswith("_created")  # times of start, no measures
            ],
        )
        for family in library.REGISTRY.collect()
        if family.name.startswith(_PREFIX)
    ]
