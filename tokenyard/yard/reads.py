"""Bounded reads of what a yard may have many of: entries of streams, ledgers, intakes.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import redis

from tokenyard.protocol.keys import PRIORITY_CLASSES, IntakeClass, Yard, intake_name, is_tenant
from tokenyard.protocol.streams import position

T = TypeVar("T")
Fields = Mapping[bytes, bytes]
#: Client and id of a request.
Owned = tuple[str, str]
#: Entries or ledgers in one read; small, because a request may have some MiB.
_PAGE: Final = 100
_ENTRY: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
#: Keys of one SCAN.
_SCANNED: Final = 1000


def is_entry(text: str) -> bool:
    """Whether an entry of a stream may have this id."""
    return bool(_ENTRY.fullmatch(text)) and 0 < max(position(text)) < 2**64


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


def ledgers(
    yard: Yard, budget: Budget, *, client: str = "", request_id: str = "", cursor: int = 0
) -> Iterator[tuple[int, list[Owned]]]:
    """Client and id of each ledger by SCAN, optionally of those of one client or with one id.

    With each page comes where a search continues after it; 0: it has seen all. It begins at
    ``cursor``, where an earlier search has reached its limit.
    """
    prefix = yard.keys.ledger("", "").removesuffix("/")
    pattern = f"{glob_literal(prefix + client)}{'' if client else '*'}/"
    pattern += glob_literal(request_id) if request_id else "*"
    while budget.take(_SCANNED):
        answer: Any = yard.connection.scan(cursor, match=pattern, count=_SCANNED)
        cursor, names = answer
        texts = (name.decode(errors="replace").removeprefix(prefix) for name in names)
        page = [(owner, name) for owner, _, name in (text.partition("/") for text in texts)]
        yield cursor, [one for one in page if client in {"", one[0]} and request_id in {"", one[1]}]
        if not cursor:
            return


def pages(items: Sequence[T], at_once: int = _PAGE) -> Iterator[Sequence[T]]:
    """The items, as many at a time as are read at once."""
    return (items[at : at + at_once] for at in range(0, len(items), at_once))


def glob_literal(text: str) -> str:
    """Escape text for a glob pattern."""
    return "".join(f"\\{one}" if one in "*?[]^\\" else one for one in text)


#: Tenants that are looked at in one round trip.
_TENANTS_AT_ONCE: Final = 1_000


def intakes(yard: Yard, most_tenants: int = sys.maxsize) -> list[tuple[IntakeClass, str]]:
    """Class and name of each intake, of tenants only where something waits; ``retry`` is last.

    Of tenants at most ``most_tenants`` are looked at, the next in line first.
    """
    of_tenants = list(_of_tenants(yard, most_tenants))
    named: list[tuple[IntakeClass, str]] = []
    for priority_class in PRIORITY_CLASSES:
        named.append((priority_class, priority_class))
        named += [one for one in of_tenants if one[0] == priority_class]
    return [*named, ("retry", "retry")]


def _of_tenants(yard: Yard, most: int) -> Iterator[tuple[IntakeClass, str]]:
    run: Any = yard.connection
    for at in range(0, most, _TENANTS_AT_ONCE):
        last = min(at + _TENANTS_AT_ONCE, most) - 1
        page = [raw.decode(errors="replace") for raw in run.zrange(yard.keys.line, at, last)]
        names: list[tuple[IntakeClass, str]] = [
            (priority_class, intake_name(priority_class, tenant))
            for tenant in filter(is_tenant, page)
            for priority_class in PRIORITY_CLASSES
        ]
        lengths = intake_lengths(yard, [name for _, name in names])
        yield from (name for name, length in zip(names, lengths, strict=True) if length)
        if len(page) < _TENANTS_AT_ONCE:
            return


def intake_lengths(yard: Yard, names: Iterable[str]) -> list[int]:
    """How many entries each of these intakes has."""
    pipeline = yard.connection.pipeline(transaction=False)
    for name in names:
        pipeline.xlen(yard.keys.intake(name))
    return list(pipeline.execute())
