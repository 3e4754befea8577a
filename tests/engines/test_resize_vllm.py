"""An engine of real vLLM that gets free processes and returns them, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.pages import code, page, section
from tests.engines.harness import MODELS, run_program
from tests.engines.on_cpu import needs_cpu

pytestmark = [pytest.mark.vllm, needs_cpu]

#: Writes its results to the given file: vLLM prints on stdout.
PROGRAM = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tokenyard.protocol.errors import LoadFailed
from worker import WorkerController

SUMS = [(a, b) for a in range(10, 100, 9) for b in range(10, 100, 9)]

def wrong(engine):
    results = engine.generate([f"{a}+{b}=" for a, b in SUMS])
    return sum(int(one.text) != a + b for one, (a, b) in zip(results, SUMS))

def look(engine):
    return [engine.devices, wrong(engine), [one.pid for one in engine_pool.status()]]

def main():
    global engine_pool
    with WorkerController("models.toml", slots=3, timeout_s=100.0, leak_tolerance=1.0) as pool:
        engine_pool = pool
        pool.wait_warm()
        engine = pool.create("adder")
        seen = {"one": look(engine)}
        with ThreadPoolExecutor(9) as threads:
            early = [threads.submit(wrong, engine) for _ in range(4)]
            resized = threads.submit(engine.resize, tensor_parallel_size=2)
            late = [threads.submit(wrong, engine) for _ in range(4)]
            resized.result()
            seen["meanwhile"] = [one.result() for one in early + late]
        seen["two"] = look(engine)
        try:
            engine.resize(tensor_parallel_size=3)
        except LoadFailed as fault:
            seen["fault"] = str(fault)
        seen["back"] = look(engine)
        engine.resize(tensor_parallel_size=1)
        seen["one again"] = look(engine)
        seen["states"] = [one.state for one in pool.status()]
    Path(sys.argv[1]).write_text(json.dumps(seen))

if __name__ == "__main__":
    main()
"""


def test_an_engine_grows_and_shrinks_and_stays_right(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_program(PROGRAM, tmp_path, str(report), cwd=MODELS.parent)
    seen = json.loads(report.read_text())

    # I expect right answers at every size and in between,
    assert seen["meanwhile"] == [0] * 8
    for name, devices in (("one", [0]), ("two", [0, 1]), ("back", [0, 1]), ("one again", [0])):
        assert seen[name][:2] == [devices, 0], name
    # vLLM's own reason for an impossible split,
    assert "divisible" in seen["fault"]
    # and one leader until a load fails, and one after; the other processes are free again.
    leaders = [seen[name][2][0] for name in ("one", "two", "back", "one again")]
    assert leaders[0] == leaders[1] != leaders[2] == leaders[3]
    assert seen["states"][0] == "ready"
    assert "attached" not in seen["states"]


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    [example] = code(section(page("docs/warm-workers.md"), "### Another size"), "python")

    printed = run_program(example, tmp_path, cwd=MODELS.parent)

    lines = [line for line in printed.splitlines() if line.startswith("(0,")]
    assert lines == ["(0,) 46", "(0, 1) 46", "(0,) 46"]
