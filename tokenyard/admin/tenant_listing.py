"""Names of tenants, a bounded part of them at once, however many there are.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.protocol.keys import MAX_TENANT, is_tenant
from tokenyard.protocol.yard import Yard

#: So many are sorted by name; of more, those are listed that were served, who had most first.
MOST_SORTED: Final = 2_000
#: Names that a search visits, about, and those that it returns.
MOST_VISITED: Final = 50_000
MOST_FOUND: Final = 200
_PAGE: Final = 1_000


@dataclass(frozen=True, slots=True)
class TenantNames:
    """Some names of tenants."""

    names: Sequence[str]
    total: int  # of which they are a part
    is_whole: bool = True  # False: there are others, which only a search finds


def list_tenants(yard: Yard, first: int, count: int) -> TenantNames:
    """Names of those that somebody has set or that were served, from the ``first`` on."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    pipeline.hlen(yard.keys.tenants)
    pipeline.zcard(yard.keys.service)
    have_settings, served = pipeline.execute()
    if have_settings + served > MOST_SORTED:
        # By ranks from the end: who has had most comes first.
        found: Any = yard.connection.zrange(yard.keys.service, -first - count, -first - 1)
        names = _tenants(reversed(found)) if first < served else []
        return TenantNames(names, served, is_whole=False)
    pipeline.hgetall(yard.keys.tenants)
    pipeline.zrange(yard.keys.service, 0, -1)
    known = sorted({name for names in pipeline.execute() for name in _tenants(names)})
    return TenantNames(known[first : first + count], len(known))


def search_tenants(yard: Yard, text: str) -> TenantNames:
    """Names that contain a text, also in other letters' case."""
    if len(text) > MAX_TENANT:
        return TenantNames((), 0)
    pattern = "*" + re.sub(r"[^\w:@-]", _escaped, text) + "*"
    found: set[str] = set()
    is_whole = True
    for scan, key in (
        (yard.connection.hscan, yard.keys.tenants),
        (yard.connection.zscan, yard.keys.service),
    ):
        cursor, visited = 0, 0
        while visited < MOST_VISITED and len(found) <= MOST_FOUND:
            run: Any = scan
            cursor, page = run(key, cursor, match=_any_case(pattern), count=_PAGE)
            visited += _PAGE
            found.update(_tenants(one if isinstance(one, bytes) else one[0] for one in page))
            if not cursor:
                break
        is_whole = is_whole and not cursor
    names = sorted(found, key=lambda name: (name != text, name))
    return TenantNames(names[:MOST_FOUND], len(names), is_whole and len(names) <= MOST_FOUND)


def _escaped(match: re.Match[str]) -> str:
    return f"\\{match[0]}"


def _any_case(pattern: str) -> str:
    return re.sub("[A-Za-z]", lambda match: f"[{match[0].lower()}{match[0].upper()}]", pattern)


def _tenants(names: Iterator[bytes] | Sequence[bytes] | Any) -> list[str]:
    decoded = (name.decode(errors="replace") for name in names)
    return [name for name in decoded if is_tenant(name)]
