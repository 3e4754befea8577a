"""Whether vLLM runs on the CPU here; not in `harness`, which does not import vLLM."""

from __future__ import annotations

import pytest
from vllm.platforms import current_platform

ON_CPU = current_platform.is_cpu()
needs_cpu = pytest.mark.skipif(not ON_CPU, reason="is about vLLM's CPU backend")
