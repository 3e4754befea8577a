"""The page that lists requests."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote, unquote, urlencode

from tokenyard.board.page import Parameters
from tokenyard.protocol.keys import Yard, is_name
from tokenyard.protocol.streams import position
from tokenyard.yard.listing import (
    ORDERS,
    Filter,
    Missed,
    Query,
    RequestList,
    list_requests,
    read_filter,
)
from tokenyard.yard.requests import STATES, Place

# The page that lists requests.

PATH: Final = "/requests"
#: Requests on a page.
LIMIT: Final = 50
#: Most entries of intakes to read for a page, and as many of lanes.
MOST_ENTRIES: Final = 2_000
#: Most tenants and workers whose streams are read.
MOST_STREAMS: Final = 20
#: Most keys of the server to look at for an id, whose ledgers alone are then read.
MOST_KEYS_FOR_ID: Final = 100_000
#: Most keys to look at for ended requests, whose ledgers are all read.
MOST_KEYS: Final = 5_000
#: The same where their results must be read, too: for a model or an error.
MOST_KEYS_WITH_RESULTS: Final = 2_500
_MOST_CURSOR: Final = 2**64 - 1
_PAST_ALL: Final = 2**64  # no number of an entry is so high


def view_requests(yard: Yard, given: Parameters) -> dict[str, Any]:
    """The requests that fit the filter in the address, and where to go on."""
    wanted = filter_of(given)
    after, cursor = given.text("after"), _cursor(given.text("scan"))
    query = wanted.query(
        limit=LIMIT,
        most=MOST_ENTRIES,
        most_keys=_most_keys(wanted),
        most_streams=MOST_STREAMS,
        after=given_place(after),
        cursor=cursor,
    )
    found = list_requests(yard, query)
    return {
        "wanted": wanted,
        "found": found,
        "all_states": STATES,
        "orders": ORDERS,
        "missed": _missed(query, found),
        "next_page": _next_page(wanted, found, cursor),
        "first_page": _address(wanted) if after or cursor else "",
        "is_live": not (wanted.searches_ended or after or cursor),
        "here": _address(wanted, after=after, scan=cursor),
    }


def filter_of(given: Parameters) -> Filter:
    """The filter in an address; raises `BadInput`."""
    texts = {name: given.text(name) for name in given.values}
    return read_filter({**texts, "id": given.raw("id"), "state": given.texts("state")})


def place_text(place: Place) -> str:
    """A place in a list as a parameter; `given_place` is the inverse."""
    accepted_ms, number, client, request_id = place
    return f"{accepted_ms}-{number}/{client}/{quote(request_id, safe='')}"


def given_place(text: str) -> Place | None:
    """The place in a parameter; None where there is none, or not a valid one."""
    entry, _, name = text.partition("/")
    client, _, quoted = name.partition("/")
    accepted_ms, number = position(entry)
    if not is_name(client) or max(accepted_ms, number) >= _PAST_ALL:
        return None
    return accepted_ms, number, client, unquote(quoted, errors="replace")


def _most_keys(wanted: Filter) -> int:
    if wanted.id:
        return MOST_KEYS_FOR_ID
    return MOST_KEYS_WITH_RESULTS if wanted.model or wanted.error else MOST_KEYS


def _cursor(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_CURSOR))
    return min(int(text), _MOST_CURSOR) if is_number else 0


def _next_page(wanted: Filter, found: RequestList, cursor: int) -> tuple[str, str]:
    """Address and name of what comes after this page; empty where nothing does."""
    if found.has_more:
        after = place_text(found.requests[-1].place)
        return _address(wanted, after=after, scan=cursor), "Next page"
    if found.cursor:
        return _address(wanted, scan=found.cursor), "Search on"
    return "", ""


def _address(wanted: Filter, **more: str | int) -> str:
    given = [*wanted.parameters(), *((name, str(value)) for name, value in more.items() if value)]
    return f"{PATH}?{urlencode(given, quote_via=quote, safe='')}" if given else PATH


def _missed(query: Query, found: RequestList) -> list[str]:
    """What was not read, and how to narrow the search, in sentences."""
    said: dict[Missed, str] = {
        "entries": f"Only {query.most:,} entries of the queues were read, and more requests may"
        " match. Give a tenant, a worker or an id, or another age.",
        "keys": f"Only {query.most_keys:,} keys of the server were searched for ended requests, in"
        " no order. Search on, or give client and id.",
        "tenants": f"Only the queues of the {query.most_streams} tenants that are next in line were"
        " read. Give a tenant.",
        "workers": f"Only the lanes of {query.most_streams} workers were read. Give a worker.",
    }
    return [text for what, text in said.items() if what in found.missed]
