"""Runs bursts on a yard of whichever checkout Python imports: one side of `broker_versus`.

It prints a line when its yard is up, and for each number of requests that it reads how it went.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from benchmarks.broker import WINDOW, WORKERS, Checked
from benchmarks.measure import measure_throughput
from benchmarks.yard import embedded_broker, simulated_yard
from tokenyard import Client

WARM_UP = 4_000


def main() -> None:
    """Answer until standard input ends."""
    with (
        embedded_broker() as broker,
        simulated_yard(broker, "bench", WORKERS, max_num_seqs=WINDOW) as yard,
        Client(yard.url, yard=yard.name) as client,
    ):
        checked = Checked(client)
        checked.many(WARM_UP)
        print("up", flush=True)
        for line in sys.stdin:
            count = int(line)
            took = measure_throughput(yard.pids, partial(checked.many, count))
            print(json.dumps({"seconds": took.seconds, "cpu_s": dict(took.cpu_s)}), flush=True)


if __name__ == "__main__":
    main()
