"""What waits for a model: the input of the decision which worker should hold which model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests for one model (its adapters' included) that wait in the intake, as far as known."""

    model: str
    requests: int
    tokens: int  # of their prompts, estimated where a prompt is text
    oldest_wait_s: float  # since the oldest came in
