"""Imported by the fork-server behind all the rest: what it holds is frozen before it is shared.

So a new process need not search it for garbage, and the pages that hold it stay shared.
"""

from __future__ import annotations

from worker.engines.vllm.warm_base import freeze

freeze()
