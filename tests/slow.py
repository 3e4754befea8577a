"""Tests that may take more than 20 s, or start a vLLM of their own: which, and why.

A new one needs an entry here. To see how long tests take: ``pytest --durations 20``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: In `make test`, by function; at most five.
GATE: Final[Mapping[str, str]] = {
    "tests/conftest.py::stand": "starts the one yard with vLLM, which serves all tests of vLLM",
    "tests/test_wheel.py::test_wheel_alone_with_its_base_dependencies_gives_a_client": (
        "builds a virtual environment and installs into it"
    ),
}

#: In `make test-long`, by file or folder.
LONG: Final[Mapping[str, str]] = {
    "tests/batch/test_arithmetic.py": "its jobs load vLLM and answer thousands of lines",
    "tests/batch/test_rq.py": "RQ's worker looks for cancelled and scheduled jobs each second",
    "tests/board/browser": "Chromium, and a yard for each state of a page",
    "tests/cli/test_cannot_start.py": "engines of vLLM that fail in each way",
    "tests/cli/test_demo.py": "the whole demo, with vLLM",
    "tests/cli/test_old_vllm.py": "an engine for each older vLLM that is played",
    "tests/cli/test_signals.py": "`up` as a process, with all its programs",
    "tests/crash/test_chaos.py": "kills processes under load, with and without vLLM",
    "tests/crash/test_core.py": "fronts and cores of vLLM that are killed",
    "tests/crash/test_clocks.py": "leases that end by the broker's own clock",
    "tests/deploy": "each kind of deployment as processes",
    "tests/e2e/test_models_on_demand.py": "vLLM loads, swaps and unloads several models",
    "tests/e2e/test_pauses.py": "an engine of vLLM that is paused while it answers",
    "tests/engines": "each file has engines of vLLM of its own",
    "tests/gateway/test_bad_input.py": "10,000 bodies, beside a neighbour's streams",
    "tests/gateway/test_batches.py": "batch workers as processes, which are killed",
    "tests/gateway/test_drain.py": "gateways that stop while they stream",
    "tests/gateway/test_proxy.py": "fifty outages of up to a minute",
    "tests/gateway/test_up.py": "`up` with vLLM and a gateway",
    "tests/integration/test_tenant_bound.py": "a search of Hypothesis with real scripts",
    "tests/model": "Spin visits all states of the protocol's model",
    "tests/scripts/test_state_machine.py": "a search of Hypothesis with real scripts",
    "tests/test_light.py": "installs into a clone and runs the tests that need no vLLM there",
    "tests/unit/coordinator/test_placement_over_time.py": "a search of Hypothesis",
    "tests/unit/coordinator/test_placement_properties.py": "searches of Hypothesis",
    "tests/unit/coordinator/test_search_properties.py": "a search of Hypothesis",
    "tests/unit/gpu_kit/test_parts.py": "runs pytest until it is ended",
}
