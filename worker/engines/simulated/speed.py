"""The speed of a simulated device."""

from __future__ import annotations

from dataclasses import dataclass

from tokenyard import clock


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Rates and sizes that determine the time of a step; zero means no limit.

    A step prefills the uncached tokens of new prompts, and then makes ``tokens_per_step`` tokens
    for every request in the batch. Without a decode rate, a request that does not stream takes one
    step.
    """

    prefill_tokens_per_s: float = 0.0  # of all prompts together
    decode_tokens_per_s: float = 0.0  # of each sequence, regardless of their number
    max_num_seqs: int = 0
    tokens_per_step: int = 1
    cache_tokens: int = 0  # capacity of the prefix cache; zero: no cache


class SimulatedDevice:
    """Sleeps for the time that a device would need."""

    def __init__(self, speed: SpeedModel) -> None:
        self._speed = speed
        self._free_at_s = 0.0  # monotonic

    def work(self, prefilled: int) -> None:
        """Run one step with ``prefilled`` uncached prompt tokens.

        Steps end by the device's own clock: after a sleep that was too long, the next ones are
        shorter.
        """
        cost_s = 0.0
        if self._speed.prefill_tokens_per_s:
            cost_s += prefilled / self._speed.prefill_tokens_per_s
        if self._speed.decode_tokens_per_s:
            cost_s += self._speed.tokens_per_step / self._speed.decode_tokens_per_s
        if not cost_s:
            return
        now = clock.monotonic()
        if now - self._free_at_s > cost_s:
            self._free_at_s = now  # it was idle, not late
        self._free_at_s += cost_s
        if self._free_at_s > now:
            clock.sleep(self._free_at_s - now)
