"""A page: a function that reads, for somebody who asks, and a template that shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.protocol.api_keys import Role
from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.yard import Yard

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
