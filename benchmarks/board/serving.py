"""The board in a process of its own, and a visitor."""

from __future__ import annotations

import html
import itertools
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import httpx

from benchmarks.cold_start.serve import HOST
from benchmarks.yard import START_TIMEOUT_S, running_programs
from tokenyard.board.forms import ROOT
from tokenyard.board.pages import PAGES
from tokenyard.process.embedded_broker import free_port

_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05
_HREF: Final = re.compile(r'href="([^"#]+)')
#: Lists that are filtered: what matches stands nowhere, or at the end.
SEARCHES: Final = (
    "/requests?error=nothing-is-like-this",
    "/requests?tenant=tenant-00099",
    "/dead?text=nothing-is-like-this",
    "/tenants?show=all",
    "/tenants?q=tenant-00099",
    "/devices?q=host-00",
    "/signals?q=host-00",
)


@contextmanager
def serving_board(redis_url: str, yard: str) -> Iterator[tuple[str, int]]:
    """Run `tokenyard board`; its URL and its pid."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    words = ["--redis-url", redis_url, "--yard", yard, "board", "--port", str(port)]
    with running_programs({"board": ["tokenyard", *words]}) as watch:
        until = time.monotonic() + START_TIMEOUT_S
        while watch.is_well() and not _answers(url):
            if time.monotonic() > until:
                raise TimeoutError(f"the board does not answer after {START_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        yield url, watch.pids["board"]


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}{ROOT}/", timeout=_TIMEOUT_S).is_success
    return False


class Visitor:
    """Asks for pages, never twice for the same address: reads of one are shared for a second."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self._count = itertools.count()

    def get(self, path: str) -> bytes:
        """One page; ends the benchmark if it cannot be read."""
        mark = "&" if "?" in path else "?"
        answer = self._client.get(f"{ROOT}{path}{mark}turn={next(self._count)}")
        if answer.status_code != httpx.codes.OK:
            sys.exit(f"{path}: {answer.status_code} {answer.text[:500]}")
        return answer.content

    def paths(self) -> list[str]:
        """The pages of the menu, one of each kind that they lead to, and searches."""
        found = [page.path for page in PAGES if page.menu]
        links = {
            html.unescape(link).removeprefix(ROOT)
            for path in found
            for link in _HREF.findall(self.get(path).decode())
        }
        for page in PAGES:
            if not page.menu:
                pattern = re.compile(re.sub(r"\{[^}]*\}", "[^/?]+", page.path) + r"(\?.*)?")
                found += sorted(link for link in links if pattern.fullmatch(link))[:1]
        return [*found, *SEARCHES]

    @contextmanager
    def looking(self, path: str) -> Iterator[None]:
        """Keep a page open, as a browser does."""
        events = {"accept": "text/event-stream"}
        with self._client.stream("GET", f"{ROOT}{path}", headers=events) as stream:
            next(stream.iter_raw())
            yield
