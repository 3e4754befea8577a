"""A page: a function that reads, and a template that shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenyard.board.yard import Parameters
from tokenyard.protocol.api_keys import Role
from tokenyard.protocol.yard import Yard

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
