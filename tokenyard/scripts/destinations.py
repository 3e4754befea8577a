"""The reply stream of a request."""

from __future__ import annotations

from collections.abc import Iterable

from tokenyard.protocol.keys import Keys
from tokenyard.protocol.wire import Refused, ReplyKind, Request
from tokenyard.scripts.answers import Publication

Groups = list[tuple[tuple[str, ReplyKind], list[tuple[int, Publication]]]]


def destination(keys: Keys, request: Request | Refused) -> str:
    """The stream that a request's replies go to."""
    if request.kind == "frame":
        return keys.replies(request.client)
    return keys.reply(request.client, request.id)


def by_destination(keys: Keys, items: Iterable[Publication]) -> Groups:
    """Group publications by reply stream, each with its index in ``items``."""
    groups: dict[tuple[str, str], list[tuple[int, Publication]]] = {}
    for at, item in enumerate(items):
        request = item.assignment.request
        whose = (request.client, "" if request.reply_to else request.id)
        groups.setdefault(whose, []).append((at, item))
    firsts = [(group[0][1].assignment.request, group) for group in groups.values()]
    return [((destination(keys, first), first.kind), group) for first, group in firsts]
