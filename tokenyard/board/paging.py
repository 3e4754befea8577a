"""Lists in numbered pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenyard.board.addresses import address
from tokenyard.board.yard import Parameters

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
