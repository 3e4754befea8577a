"""A yard whose coordinators the test turns."""

from __future__ import annotations

from typing import Any

from coordinator.coordinator import Coordinator
from tests.support.lanes import Lanes


class TurnedYard(Lanes):
    """A yard whose workers the test plays, and whose coordinators run no thread."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.leading: list[Coordinator] = []

    def close(self) -> None:
        for one in self.leading:
            one._close()
        super().close()

    def leader(self, **values: Any) -> Coordinator:
        """A coordinator that has had its first turn; it places no models."""
        settings = self.settings(**{"block_ms": 20, "lease_ms": 60_000, "static": True, **values})
        one = Coordinator(settings)
        self.leading.append(one)
        one.run_once()
        return one
