"""A page: a function that reads, for somebody who asks, and a template that shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

from tokenyard.protocol.api_keys import Role
from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.keys import Yard

# What a page or an action works on: the yard, who asks, and what was given.

#: Most characters of one parameter.
MAX_PARAMETER: Final = 10_000
#: Most characters of the reason for an action; the rest is cut off.
MAX_WHY: Final = 200


@dataclass(frozen=True, slots=True)
class Actor:
    """Who looks or acts."""

    name: str  # "local" without keys, else the key's id and name
    role: Role
    shows_content: bool = False  # whether prompts and answers are shown

    def may(self, role: Role) -> bool:
        """Whether its role suffices."""
        return RANK[self.role] >= RANK[role]


RANK: Final[Mapping[Role, int]] = {"viewer": 0, "operator": 1, "admin": 2}


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a path and a query, or the fields of a form: hostile until parsed."""

    values: Mapping[str, Sequence[str]]
    actor: Actor

    def text(self, name: str, usual: str = "") -> str:
        """The first value, without blanks around it."""
        found = self.values.get(name)
        return found[0].strip() if found else usual

    def raw(self, name: str) -> str:
        """The first value with its blanks, which belong to the id of a request."""
        return next(iter(self.texts(name)), "")

    @property
    def why(self) -> str:
        """The reason that the operator gives for an action."""
        return self.text("why")[:MAX_WHY]

    def texts(self, name: str) -> list[str]:
        """All values."""
        return list(self.values.get(name, ()))

    def whole(self, name: str, usual: int, least: int, most: int) -> int:
        """A whole number within bounds; raises `BadInput`."""
        text = self.text(name)
        if not text:
            return usual
        is_number = text.isascii() and text.isdecimal() and len(text) < 16
        if not (is_number and least <= int(text) <= most):
            raise BadInput(f"{name}: give a whole number from {least} to {most}", name)
        return int(text)

    def one_of(self, name: str, choices: Sequence[str], usual: str) -> str:
        """One of some choices; raises `BadInput`."""
        text = self.text(name, usual) or usual
        if text not in choices:
            raise BadInput(f"{name}: give one of {', '.join(choices)}", name)
        return text


#: Reads what the template shows. It runs in a thread; errors of redis-py pass.
View = Callable[[Yard, Parameters], dict[str, Any]]


class NotFound(Exception):
    """There is no such thing; its text says what was looked for."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page. The template's blocks named ``live_...`` are sent again when they change."""

    path: str  # below the board, "/requests/{client}/{id}"
    title: str
    template: str
    view: View
    role: Role = "viewer"
    menu: str = ""  # its name in the menu; "": it is not there
    every_s: float = 2.0  # pause between two looks of an open page


# Lists in numbered pages.

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
