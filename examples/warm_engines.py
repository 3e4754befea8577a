"""Engines in a fraction of a second, without Redis: two models in turn in a warm process.

    python examples/warm_engines.py

Needs vLLM. docs/warm-workers.md has more.
"""

import time
from pathlib import Path

from worker import WorkerController

MODELS = Path(__file__).parent / "arithmetic" / "models.toml"
SUMS = {"adder": "27+48=", "subtractor": "75-48="}


def ask(controller: WorkerController, model: str, prompt: str) -> None:
    """Create an engine, ask it once, and close it."""
    began = time.perf_counter()
    with controller.create(model) as engine:
        created_s = time.perf_counter() - began
        [result] = engine.generate(prompt, temperature=0)
        answered_s = time.perf_counter() - began
        longest = max(engine.phases_s, key=lambda phase: engine.phases_s[phase])
    print(
        f"{prompt}{result.text}  by {model}, created in {created_s:.2f} s, "
        f"answered after {answered_s:.2f} s, most of it {longest}"
    )


def main() -> None:
    """Warm up a process once, then switch models as often as you like."""
    began = time.perf_counter()
    with WorkerController(MODELS) as controller:
        controller.wait_warm()
        print(f"warm after {time.perf_counter() - began:.1f} s")
        for _ in range(3):
            for model, prompt in SUMS.items():
                ask(controller, model, prompt)
        print(*controller.status(), sep="\n")


# Worker processes also import this file.
if __name__ == "__main__":
    main()
