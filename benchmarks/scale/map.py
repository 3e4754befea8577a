"""Measures whether the memory of `map` and the services stays flat; see `benchmarks.scale`.

python -m benchmarks.scale.map URL YARD PROMPTS PIDS REPORT
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from benchmarks.child import run_child
from benchmarks.progress import tell
from benchmarks.scale.fleet import answer
from benchmarks.scale.yard import Fleet, scale_yards
from tokenyard import Client
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.protocol.wire import pack_tokens, unpack_tokens

#: When to look at memory, in percent of the prompts.
LOOKS: Final = (10, 50, 100)
#: Short, so that a million of them take minutes.
_PROMPT: Final = (1, 2, 3, 4, 5, 6, 7, 8)
#: Short, so that the broker keeps only the results of the last seconds.
RESULT_TTL_S: Final = 5
_TIMEOUT_S: Final = 1200.0

#: Resident bytes by process, at each of `LOOKS`.
SnapshotHistory = list[dict[str, int]]


def measure(broker: EmbeddedBroker, count: int) -> SnapshotHistory:
    """Run a `map` over ``count`` prompts in its own process."""
    tell(f"map: {count:,}")
    with scale_yards(broker, Fleet()) as yards:
        words = [yards.url, yards.names[0], str(count), json.dumps(yards.pids)]
        looks: SnapshotHistory = run_child("benchmarks.scale.map", words, timeout_s=_TIMEOUT_S)
    return looks


def grown(looks: SnapshotHistory) -> dict[str, float]:
    """Memory at the last look relative to the first, by process."""
    return {name: looks[-1][name] / looks[0][name] for name in looks[0]}


def ask(url: str, yard: str, count: int, pids: Mapping[str, Sequence[int]]) -> SnapshotHistory:
    """Send the prompts, check the answers, and look at the memory of all processes meanwhile."""
    expected = unpack_tokens(answer(pack_tokens(_PROMPT)))
    at = {count * percent // 100 for percent in LOOKS}
    looks: SnapshotHistory = []
    with Client(url, yard=yard) as client:
        items = (list(_PROMPT) for _ in range(count))
        results = client.map(items, window=2048, max_tokens=8, result_ttl_s=RESULT_TTL_S)
        for done, (_, result) in enumerate(results, 1):
            if result.tokens != expected:
                sys.exit(f"wrong answer {result}")
            if done in at:
                look = {name: psutil.Process(pid).memory_info().rss for name, [pid] in pids.items()}
                looks.append(look)
    return looks


def main() -> None:
    """Write the measurements as JSON."""
    url, yard, count, told, report = sys.argv[1:]
    pids = {"client": [os.getpid()], **json.loads(told)}
    Path(report).write_text(json.dumps(ask(url, yard, int(count), pids)), encoding="utf-8")


if __name__ == "__main__":
    main()
