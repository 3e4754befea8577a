"""Requests that are to be cancelled when their client disappears, as that client keeps them.

It renews its lease while it has any (`scripts.attend`); the coordinator cancels what a client
leaves behind whose lease has run out. No I/O here; times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenyard.client.pending import PendingRequest
from tokenyard.protocol.errors import UnknownRequest
from tokenyard.scripts import CLIENT_LEASE_MS

RENEW_EVERY_S: Final = CLIENT_LEASE_MS / 3000
#: Ids that have ended are told sooner than the next renewal where they are so many.
MANY_ENDED: Final = 500


class ClientLease:
    """The ids that are attached to a client's lease, and what to tell the server of them."""

    def __init__(self) -> None:
        self._attached: dict[str, PendingRequest] = {}
        self._ended: set[str] = set()  # written by whoever brings replies
        self._renewed_at = 0.0

    def attach(self, exchanges: Iterable[PendingRequest], now: float) -> None:
        """These are submitted, which has renewed the lease."""
        self._renewed_at = now
        for exchange in exchanges:
            if exchange.id in self._attached:
                continue
            self._attached[exchange.id] = exchange
            exchange.listeners.append(self._note)
            self._note(exchange)

    def _note(self, exchange: PendingRequest) -> None:
        """A request that nobody waits for any more has not ended by that."""
        if exchange.final is not None or isinstance(exchange.fault, UnknownRequest):
            self._ended.add(exchange.id)

    def is_due(self, now: float) -> bool:
        """Whether the server should be told something now."""
        if not self._attached:
            return False
        return now - self._renewed_at >= RENEW_EVERY_S or len(self._ended) >= MANY_ENDED

    def take_ended(self, now: float) -> list[str]:
        """The ids that have ended, which the caller tells the server with the lease's renewal."""
        self._renewed_at = now
        ended, self._ended = self._ended, set()
        for name in ended:
            self._attached.pop(name, None)
        return list(ended)

    @property
    def has_any(self) -> bool:
        """Whether anything is attached."""
        return bool(self._attached)

    def unfinished(self) -> list[str]:
        """The ids that are attached and have not ended, the oldest first."""
        return [name for name in self._attached if name not in self._ended]

    def end(self, names: Iterable[str]) -> None:
        """These were cancelled."""
        self._ended.update(names)
