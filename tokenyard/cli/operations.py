"""The commands that are nothing but an operation: of requests, intakes and signals."""

from __future__ import annotations

from functools import partial
from typing import Final

from tokenyard.cli.shared.operating import command
from tokenyard.ops import intakes, requests, signals

# `tokenyard cancel`, `empty` and `requeue`: end requests, or submit failed ones again.

cancel = command(requests.cancel, "cancel", "Cancel requests in any state.", asks=True)
empty = command(intakes.empty, "empty", "Cancel waiting requests; asks first.", asks=True)
requeue = command(requests.requeue, "requeue", "Submit failed requests again.")


# `tokenyard pause`, `unpause`, `suspend`, `resume`, `epoch`, `drain`, `stop`.

#: Seconds that a command waits until all have obeyed.
_TIMEOUT_S: Final = 120.0
_signal = partial(command, timeout_s=_TIMEOUT_S)

pause = _signal(signals.pause, "pause", "Let workers take no new requests.")
unpause = _signal(signals.unpause, "unpause", "Let paused workers run again.")
suspend = _signal(signals.suspend, "suspend", "Free the devices of paused workers.")
resume = _signal(signals.resume, "resume", "Wake suspended workers; they stay paused.")
epoch = _signal(signals.epoch, "epoch", "Set the epoch of results.", arguments=["epoch"])
drain = _signal(signals.drain, "drain", "End workers after their requests.", asks=True)
stop = _signal(signals.stop, "stop", "End workers immediately.", asks=True)
