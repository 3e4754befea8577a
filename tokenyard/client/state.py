"""What the parts of a client's core share: its names, its requests, and its way to the yard.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenyard.client.build import RequestBuilder
from tokenyard.client.ledger import read_snapshots, snapshot_commands
from tokenyard.client.operations import Ask, Steps
from tokenyard.client.pending import PendingRequest
from tokenyard.client.router import ReplyRouter
from tokenyard.protocol.errors import UnknownRequest
from tokenyard.protocol.keys import Keys
from tokenyard.scripts.client import CLIENT_LEASE_MS

RENEW_EVERY_S: Final = CLIENT_LEASE_MS / 3000
#: With this many ended requests, the lease is renewed earlier.
MANY_ENDED: Final = 500


class ClientLease:
    """The requests of a client that are cancelled when it disappears.

    The client renews its lease while it has any (`scripts.attend`); once the lease has expired, the
    coordinator cancels them.
    """

    def __init__(self) -> None:
        self._attached: dict[str, PendingRequest] = {}
        self._ended: set[str] = set()  # written by the thread that reads replies
        self._renewed_at = 0.0

    def attach(self, requests: Iterable[PendingRequest], now: float) -> None:
        """Attach requests whose submission has renewed the lease."""
        self._renewed_at = now
        for pending in requests:
            if pending.id in self._attached:
                continue
            self._attached[pending.id] = pending
            pending.listeners.append(self._note)
            self._note(pending)

    def _note(self, pending: PendingRequest) -> None:
        """A request that was only forgotten has not ended."""
        if pending.final is not None or isinstance(pending.error, UnknownRequest):
            self._ended.add(pending.id)

    def is_due(self, now: float) -> bool:
        """Whether the lease should be renewed now."""
        if not self._attached:
            return False
        return now - self._renewed_at >= RENEW_EVERY_S or len(self._ended) >= MANY_ENDED

    def take_ended(self, now: float) -> list[str]:
        """The ids that have ended; the caller passes them on as it renews the lease."""
        self._renewed_at = now
        ended, self._ended = self._ended, set()
        for name in ended:
            self._attached.pop(name, None)
        return list(ended)

    @property
    def has_any(self) -> bool:
        """Whether any request is attached."""
        return bool(self._attached)

    def unfinished(self) -> list[str]:
        """The attached ids that have not ended, the oldest first."""
        return [name for name in self._attached if name not in self._ended]

    def end(self, names: Iterable[str]) -> None:
        """Note that these requests were cancelled."""
        self._ended.update(names)


@dataclass(slots=True)
class ClientState:
    """The state of one client."""

    url: str
    keys: Keys
    client_id: str
    connect_timeout_s: float
    result_timeout_s: float
    builder: RequestBuilder
    router: ReplyRouter
    lease: ClientLease
    is_closed: bool = False

    def catch_up(self, requests: Sequence[PendingRequest]) -> Steps[None]:
        """Bring requests that were submitted earlier up to date from their ledgers."""
        self.router.resume(requests)
        yield from self.read_ledgers(requests)

    def read_ledgers(self, requests: Sequence[PendingRequest]) -> Steps[None]:
        """Bring requests up to date from their ledgers."""
        ids = [pending.id for pending in requests]
        answers = yield Ask(snapshot_commands(self.keys, self.client_id, ids))
        self.router.settle(requests, read_snapshots(answers))
