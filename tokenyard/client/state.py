"""What the parts of a client's core share: its names, its requests, and its way to the yard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenyard.client.build import RequestBuilder
from tokenyard.client.lease import ClientLease
from tokenyard.client.ledger import read_snapshots, snapshot_commands
from tokenyard.client.operations import Ask, Steps
from tokenyard.client.pending import PendingRequest
from tokenyard.client.router import ReplyRouter
from tokenyard.protocol.keys import Keys


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
