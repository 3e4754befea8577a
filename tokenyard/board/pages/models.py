"""Models."""

from __future__ import annotations

from typing import Any, Final

from tokenyard.board.action import Action
from tokenyard.board.page import Page
from tokenyard.board.yard import Given, Yard


def _view(yard: Yard, given: Given) -> dict[str, Any]:
    return {"now": yard.connection.time()[0], "given": given.text("q")}


PAGES: Final[tuple[Page, ...]] = (Page("/models", "Models", "models.html", _view, menu="Models"),)
ACTIONS: Final[tuple[Action, ...]] = ()
