"""The pages, one module for each part of the board."""

from __future__ import annotations

from typing import Final

from tokenyard.board.page import Page
from tokenyard.board.pages import (
    audit,
    batches,
    dead,
    devices,
    keys,
    models,
    request,
    requests,
    signals,
    tenants,
    yard,
)

_MODULES: Final = (
    yard,
    devices,
    models,
    requests,
    request,
    dead,
    tenants,
    keys,
    batches,
    signals,
    audit,
)
#: In the order of the menu.
PAGES: Final[tuple[Page, ...]] = tuple(page for module in _MODULES for page in module.PAGES)
