"""Bounded reads of streams and ledgers, page by page.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import redis

from tokenyard.admin.listed import Fields, Owned
from tokenyard.protocol.yard import Yard

T = TypeVar("T")

#: Entries or ledgers in one read; small, because a request may have some MiB.
_PAGE: Final = 100
#: Keys of one SCAN.
_SCANNED: Final = 1000


class Budget:
    """A limit on entries or keys to read."""

    def __init__(self, most: int) -> None:
        self._left = most
        self.is_spent = False

    def take(self, count: int) -> bool:
        """Use up ``count``; False if the budget was spent before."""
        self.is_spent = self.is_spent or self._left <= 0
        self._left -= count
        return not self.is_spent


def entries(
    connection: redis.Redis,
    stream: str,
    budget: Budget,
    *,
    newest_first: bool = False,
    low: str = "-",
    high: str = "+",
    few: int = _PAGE,
) -> Iterator[tuple[str, Fields]]:
    """The entries of a stream between two ids, in pages; ``few`` are probably enough."""
    first, last = (high, low) if newest_first else (low, high)
    ask: Any = connection.xrevrange if newest_first else connection.xrange
    size = min(few, _PAGE)
    while budget.take(size):
        page = ask(stream, first, last, count=size)
        for entry, fields in page:
            yield entry.decode(), fields
        if len(page) < size:
            return
        first, size = f"({page[-1][0].decode()}", _PAGE


class LedgerSearch:
    """A search of ledgers by SCAN, optionally those of one client or with one id.

    It continues at ``cursor``, where an earlier search has reached its limit.
    """

    def __init__(
        self,
        yard: Yard,
        budget: Budget,
        *,
        client: str = "",
        request_id: str = "",
        cursor: int = 0,
    ) -> None:
        self._yard = yard
        self._budget = budget
        self._prefix = yard.keys.ledger("", "").removesuffix("/")
        self._id = request_id
        self._client = client
        self.cursor = cursor  # where it continues; 0: it has seen all

    def pages(self) -> Iterator[list[Owned]]:
        """Client and id of each ledger."""
        pattern = f"{_literal(self._prefix + self._client)}{'' if self._client else '*'}/"
        pattern += _literal(self._id) if self._id else "*"
        while self._budget.take(_SCANNED):
            answer: Any = self._yard.connection.scan(self.cursor, match=pattern, count=_SCANNED)
            self.cursor, names = answer
            yield [
                (client, request_id)
                for client, request_id in map(self._owner, names)
                if self._id in {"", request_id} and self._client in {"", client}
            ]
            if not self.cursor:
                return

    def _owner(self, name: bytes) -> Owned:
        text = name.decode(errors="replace").removeprefix(self._prefix)
        client, _, request_id = text.partition("/")
        return client, request_id


def pages(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items, as many at a time as are read at once."""
    return (items[at : at + _PAGE] for at in range(0, len(items), _PAGE))


def _literal(text: str) -> str:
    """Escape text for a glob pattern."""
    return "".join(f"\\{one}" if one in "*?[]^\\" else one for one in text)
