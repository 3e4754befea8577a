"""The time that a simulated device takes."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """How long a step takes; zero means no limit.

    A step prefills the prompts that joined the batch, except what the prefix cache has of them,
    and then makes ``tokens_per_step`` tokens for every request in it. Without a decode rate a
    request that does not stream is answered in one step.
    """

    prefill_tokens_per_s: float = 0.0  # of all prompts together
    decode_tokens_per_s: float = 0.0  # of each sequence, however many run
    max_num_seqs: int = 0
    tokens_per_step: int = 1
    cache_tokens: int = 0  # of the prefix cache; zero: there is none


class SimulatedDevice:
    """Sleeps as long as a device would work."""

    def __init__(self, speed: SpeedModel) -> None:
        self._speed = speed
        self._free_at_s = 0.0  # monotonic

    def work(self, prefilled: int) -> None:
        """One step, which prefills so many tokens.

        The device's clock counts, not the length of each sleep: a sleep that lasts too long is
        made up for by shorter ones.
        """
        cost_s = 0.0
        if self._speed.prefill_tokens_per_s:
            cost_s += prefilled / self._speed.prefill_tokens_per_s
        if self._speed.decode_tokens_per_s:
            cost_s += self._speed.tokens_per_step / self._speed.decode_tokens_per_s
        if not cost_s:
            return
        now = time.monotonic()
        if now - self._free_at_s > cost_s:
            self._free_at_s = now  # it was idle, not late
        self._free_at_s += cost_s
        if self._free_at_s > now:
            time.sleep(self._free_at_s - now)
