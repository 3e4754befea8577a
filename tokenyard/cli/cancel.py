"""`tokenyard cancel`, `empty` and `requeue`: end requests, or submit failed ones again."""

from __future__ import annotations

from tokenyard.cli.shared.operating import command
from tokenyard.ops import intakes, requests

cancel = command(requests.cancel, "cancel", "Cancel requests in any state.", asks=True)
empty = command(intakes.empty, "empty", "Cancel waiting requests; asks first.", asks=True)
requeue = command(requests.requeue, "requeue", "Submit failed requests again.")
