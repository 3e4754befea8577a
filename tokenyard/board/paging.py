"""Lists in numbered pages, and addresses of what has an arbitrary name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

from tokenyard.board.page import Parameters
from tokenyard.ops.names import checked_request

_MOST_PAGES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class NumberedPage:
    """One page of a list whose length is known, with the addresses of its neighbours."""

    number: int
    count: int  # of pages
    first: int  # index of its first item
    end: int  # index behind its last item
    previous: str  # "": it is the first page
    next: str  # "": it is the last page


def numbered_page(
    given: Parameters, total: int, size: int, path: str, **parameters: object
) -> NumberedPage:
    """The page that is asked for; of a list that has become shorter, the last one.

    ``parameters`` are those of the list in its address. Raises `BadInput`.
    """
    count = max(1, -(-total // size))
    number = min(asked_page(given), count)

    def to(page: int) -> str:
        return address(path, {**parameters, "page": page})

    return NumberedPage(
        number=number,
        count=count,
        first=(number - 1) * size,
        end=number * size,
        previous=to(number - 1) if number > 1 else "",
        next=to(number + 1) if number < count else "",
    )


def asked_page(given: Parameters) -> int:
    """The number of the page that is asked for; raises `BadInput`."""
    return given.whole("page", 1, 1, _MOST_PAGES)


# Addresses on the board of what has an arbitrary name. They lie below the board's root.
#
# A request's id has any characters, so an address holds it quoted.


def request_address(client: str, request_id: str) -> str:
    """The page of one request."""
    return address("/request", {"client": client, "id": request_id})


def address(path: str, parameters: Mapping[str, object]) -> str:
    """A page with its parameters; empty ones are left out."""
    given = {name: value for name, value in parameters.items() if value not in {"", None}}
    return f"{path}?{urlencode(given, quote_via=quote, safe='')}" if given else path


def given_request(given: Parameters) -> tuple[str, str]:
    """Client and id in the address of a request's page; raises `BadInput`."""
    [client, *_], [request_id, *_] = (given.texts(name) or [""] for name in ("client", "id"))
    return checked_request(client, request_id)
