"""A visitor of the board without a browser: pages, and actions asked for and done."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs, urlsplit

import pytest
import redis
from httpx import Response
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from tokenyard.admin.audit import AuditEntry, read_audit
from tokenyard.board.access import Door
from tokenyard.board.app import ROOT, Board
from tokenyard.board.settings import BoardOptions
from tokenyard.board.yard import Actor
from tokenyard.protocol.api_keys import Role
from tokenyard.protocol.keys import Keys

Fields = Mapping[str, str | Sequence[str]]
_ORIGIN: Final = "http://localhost"


class Visitor:
    """Asks the board of one yard."""

    def __init__(self, url: str, yard: str) -> None:
        self._board = Board(BoardOptions(needs_keys=False), url, yard)
        self._client = TestClient(self._board.app, base_url=_ORIGIN, follow_redirects=False)
        self._connection = redis.Redis.from_url(url)
        self._keys = Keys(yard)

    def close(self) -> None:
        self._board.close()
        self._connection.close()

    def get(self, path: str, parameters: Fields | None = None, status: int = 200) -> str:
        """The HTML of a page below the board."""
        answer = self._client.get(ROOT + path, params=parameters)  # type: ignore[arg-type]
        assert answer.status_code == status, answer.text
        return answer.text

    def ask(self, action: str, fields: Fields) -> str:
        """The page that asks whether to do it, as text."""
        return text_of(self.get(f"/do/{action}", fields))

    def post(self, action: str, fields: Fields) -> Response:
        """Do it; the answer."""
        return self._client.post(
            f"{ROOT}/do/{action}", data=dict(fields), headers={"origin": _ORIGIN}
        )

    def do(self, action: str, fields: Fields) -> AuditEntry:
        """Do it; its entry in the audit, which the page that follows tells."""
        answer = self.post(action, fields)
        assert answer.status_code == 303, answer.text
        back = answer.headers["location"]
        page = self._client.get(back)
        [done] = parse_qs(urlsplit(back).query)["done"]
        [entry] = [one for one in self.audit() if one.entry == done]
        assert entry.text in text_of(page.text)
        return entry

    def audit(self) -> Sequence[AuditEntry]:
        """The audit, the newest entry first."""
        return read_audit(self._connection, self._keys)


def let_in_as(monkeypatch: pytest.MonkeyPatch, role: Role, *, shows_content: bool = False) -> None:
    """Let everybody in with a role, as far as it goes."""

    async def enter(_door: Door, request: Request, least: Role) -> Actor | PlainTextResponse:
        request.state.actor = actor = Actor(f"a {role}", role, shows_content=shows_content)
        return actor if actor.may(least) else PlainTextResponse("not allowed", 403)

    monkeypatch.setattr(Door, "enter", enter)


def text_of(page: str) -> str:
    """What a page shows, without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())
