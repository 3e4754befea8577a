"""Looks at pages of the board and acts on them, in any role, without a browser."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from tokenyard.board.access import Door
from tokenyard.board.app import Board
from tokenyard.board.forms import ROOT
from tokenyard.board.page import Actor
from tokenyard.board.settings import BoardOptions
from tokenyard.ops.audit import AuditEntry, read_audit
from tokenyard.protocol.keys import Yard

ORIGIN = "http://localhost"
Fields = Mapping[str, str | Sequence[str]]


class Looker:
    """Somebody at the board, whose ``actor`` a test may change."""

    def __init__(self, board: Board, yard: Yard) -> None:
        self.actor = Actor("olga", "operator")
        self._client = TestClient(board.app, base_url=ORIGIN, follow_redirects=False)
        self._yard = yard
        self._looks = 0

    async def enter(self, _: Door, request: Request, role: str) -> Actor | PlainTextResponse:
        """Takes the place of the door."""
        request.state.actor = self.actor
        is_let_in = self.actor.may(role)  # type: ignore[arg-type]
        return self.actor if is_let_in else PlainTextResponse("not allowed", 403)

    def get(self, path: str, status: int = 200, parameters: Fields | None = None) -> str:
        """A page as it is now; ``path`` lies below the board."""
        # A board reads an address once a second for all who look.
        self._looks += 1
        url = httpx.URL(path if path.startswith(ROOT) else ROOT + path)
        url = url.copy_merge_params({**(parameters or {}), "look": str(self._looks)})
        answer = self._client.get(str(url))
        assert answer.status_code == status, answer.text
        return answer.text

    def live(self, path: str, name: str) -> str:
        """A live block of a page, as an open page gets it."""
        page = self.get(path)
        begin = re.search(rf'<(\w+)[^>]* id="{name}"[^>]*>|<(\w+) id="{name}"[^>]*>', page)
        assert begin, name
        tag, depth = begin[1] or begin[2], 1
        for one in re.finditer(rf"<(/?){tag}\b", page[begin.end() :]):
            depth += -1 if one[1] else 1
            if not depth:
                return page[begin.end() :][: one.start()]
        raise AssertionError(f"{name} does not end")

    def ask(self, action: str, fields: Fields, status: int = 200) -> str:
        """The page that asks whether to do it."""
        answer = self._client.get(f"{ROOT}/do/{action}", params=fields)  # type: ignore[arg-type]
        assert answer.status_code == status, answer.text
        return answer.text

    def asked(self, action: str, fields: Fields) -> str:
        """What the page that asks says."""
        return text_of(self.ask(action, fields))

    def post(self, action: str, fields: Fields) -> httpx.Response:
        """Do it."""
        return self._client.post(
            f"{ROOT}/do/{action}", data=dict(fields), headers={"origin": ORIGIN}
        )

    def do(self, action: str, fields: Fields) -> AuditEntry:
        """Do it; its entry in the audit."""
        answer = self.post(action, fields)
        assert answer.status_code == 303, answer.text
        return self.audit()[0]

    def audit(self) -> Sequence[AuditEntry]:
        """The audit, the newest entry first."""
        return read_audit(self._yard)


@contextmanager
def looking(monkeypatch: pytest.MonkeyPatch, url: str, yard: Yard) -> Iterator[Looker]:
    """A board that lets a looker in."""
    board = Board(BoardOptions(needs_keys=False), url, yard.keys.yard)
    looker = Looker(board, yard)

    async def enter(door: Door, request: Request, role: str) -> Actor | PlainTextResponse:
        return await looker.enter(door, request, role)

    monkeypatch.setattr(Door, "enter", enter)
    try:
        yield looker
    finally:
        board.close()


def text_of(page: str) -> str:
    """What a page shows, without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def links_of(page: str, text: str) -> list[str]:
    """Where the links with a text lead."""
    found = re.findall(r'<a [^>]*?href="([^"]*)"[^>]*>(.*?)</a>', page, re.DOTALL)
    return [html.unescape(href) for href, shown in found if text_of(shown) == text]


def values_of(page: str, name: str) -> list[str]:
    """The values of a form's fields of this name."""
    inputs = re.findall(r"<input [^>]*>", page)
    found = (re.search(r'value="([^"]*)"', one) for one in inputs if f'name="{name}"' in one)
    return [html.unescape(one[1]) for one in found if one]
