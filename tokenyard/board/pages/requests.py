"""Requests: found, told one by one, cancelled and requeued."""

from __future__ import annotations

from typing import Final

from tokenyard.board.page import Page
from tokenyard.board.requests.listing import PATH, view_requests
from tokenyard.board.requests.one import view_request

PAGES: Final[tuple[Page, ...]] = (
    Page(PATH, "Requests", "requests.html", view_requests, menu="Requests", every_s=5.0),
    Page("/request", "Request", "request.html", view_request, every_s=1.0),
)
