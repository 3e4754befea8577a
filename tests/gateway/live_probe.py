"""Ask a gateway whether it lives, until standard input ends; print how long each answer took.

A program of its own: the test sends large bodies, and its threads would wait for each other.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from typing import Final

EVERY_S: Final = 0.02


def main() -> None:
    client = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=120)
    took_s = list[float]()
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        before = time.perf_counter()
        client.request("GET", "/livez")
        answer = client.getresponse()
        answer.read()
        took_s.append(time.perf_counter() - before)
        if answer.status != 200:
            sys.exit(f"/livez: {answer.status}")
    client.close()
    json.dump(took_s, sys.stdout)


if __name__ == "__main__":
    main()
