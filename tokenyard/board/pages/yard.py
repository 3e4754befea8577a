"""Yard."""

from __future__ import annotations

from typing import Any, Final

from tokenyard.board.action import Action
from tokenyard.board.page import Page
from tokenyard.board.yard import Given, Yard


def _view(yard: Yard, given: Given) -> dict[str, Any]:
    return {"now": yard.connection.time()[0], "given": given.text("q")}


PAGES: Final[tuple[Page, ...]] = (Page("/", "Yard", "yard.html", _view, menu="Yard"),)
ACTIONS: Final[tuple[Action, ...]] = ()
