"""Freezes all objects of the fork-server, which imports this module last.

A new process then does not search them for garbage, and their pages stay shared.
"""

from __future__ import annotations

from worker.engines.vllm.warm_base import freeze

freeze()
