"""A window of the browser that notes everything which a page must not do."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tokenyard.board.forms import ROOT

#: Rules of WCAG 2.2, levels A and AA, and what axe calls good practice.
_AXE = "axe.run(document, {resultTypes: ['violations']})"
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: What sticks out of a narrow page, so that the failure says it.
_WIDEST = """() => [...document.querySelectorAll("body *")]
    .filter((one) => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
        && !one.closest(".table-wrap, pre, [popover]"))
    .slice(0, 5).map((one) => one.outerHTML.slice(0, 200))"""
_CUT = """() => [...document.querySelectorAll(".table-wrap")]
    .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.ariaLabel)"""


@dataclass
class Window:
    """One tab. ``faults`` are errors of scripts, breaches of the CSP and failed requests."""

    page: Any  # playwright.sync_api.Page, which may not be installed
    board: str  # URL of the board's server
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        self.page.on("response", self._answered)

    def _heard(self, message: Any) -> None:
        # A page that is refused on purpose is told apart by `_answered`.
        is_status = "Failed to load resource" in message.text
        if message.type in {"error", "warning"} and not is_status:
            self.faults.append(f"console: {message.text}")

    def _answered(self, answer: Any) -> None:
        may_fail = answer.request.resource_type in {"document", "eventsource"}
        if answer.status >= 400 and not may_fail:
            self.faults.append(f"{answer.status}: {answer.url}")

    def open(self, path: str) -> Any:
        """Open a page of the board by its path below `ROOT`; the answer."""
        return self.page.goto(f"{self.board}{ROOT}{path}")

    def follow(self, link: str) -> None:
        """Click a link by its text, and wait until the page it leads to has loaded.

        A click alone returns as soon as the page begins. Chromium may then still hold the one
        before for the active page, and refuses to go back ("Not attached to an active page").
        """
        with self.page.expect_event("load"):
            self.page.get_by_role("link", name=link, exact=True).click()

    @property
    def path(self) -> str:
        """Where it is, below `ROOT`, without the query."""
        return urlsplit(self.page.url).path.removeprefix(ROOT)

    def axe(self) -> list[str]:
        """What axe finds on the page, as texts."""
        script = importlib.resources.files("axe_playwright_python") / "axe.min.js"
        self.page.evaluate(script.read_text(encoding="utf-8"))
        found = self.page.evaluate(_AXE)["violations"]
        return [f"{one['id']}: {node['html'][:300]}" for one in found for node in one["nodes"]]

    def sticks_out(self) -> Sequence[str]:
        """What makes the page scroll sideways."""
        if self.page.evaluate(_OVERFLOW) <= 0:
            return []
        return self.page.evaluate(_WIDEST) or ["something"]

    def cut_tables(self) -> Sequence[str]:
        """The tables of which a part is beside their box."""
        return self.page.evaluate(_CUT)

    def text(self) -> str:
        """The text of the content, as it is seen."""
        return str(self.page.locator("main").inner_text())

    def wait_for_text(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait until the content shows a text."""
        self.page.locator("main", has_text=text).wait_for(timeout=1000 * timeout_s)
