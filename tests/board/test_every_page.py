"""What holds of every page, whatever is on the yard."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest

from tests.board.asking import Asking
from tests.board.hostile_yard import EVIL, MOST_BYTES, NOWHERE, write_hostile_yard
from tests.board.looking import Looker
from tests.cli.test_hostile_text import moves
from tests.support.yard import PlayedYard
from tokenyard.board.page import Actor
from tokenyard.protocol.api_keys import Role

pytestmark = pytest.mark.valkey_only


def test_every_text_is_shown_as_text(ask: Asking, yard: PlayedYard) -> None:
    there = write_hostile_yard(yard)
    asking = f"/do/model.unload?model={quote('m' + EVIL)}"
    pages = {path: ask(f"/board{path}") for path in [*there, asking, *NOWHERE]}

    for path, page in pages.items():
        assert page.status == 200 or (path not in there and page.status in {400, 404}), path
        assert len(page.body) < MOST_BYTES, path
        for mark in ("<script>doc", "<img", "<mark>b", "lt;49"):
            assert mark not in page.body, path
        # A form has to send a name as it is.
        assert moves(re.sub(r'value="[^"]*"', "", page.body)) == [], path
    assert sum("&lt;script&gt;" in page.body for page in pages.values()) >= 16


def test_each_role_sees_only_what_it_may_do(looker: Looker, yard: PlayedYard) -> None:
    paths = [path for path in write_hostile_yard(yard) if path != "/keys"]

    def found(role: Role, way: str) -> list[str]:
        looker.actor = Actor("olga", role)
        pages = {path: looker.get(path).replace("/board/do/logout", "") for path in paths}
        return [path for path, page in pages.items() if re.search(way, page)]

    way, admins = '/board/do/|name="(request|letter)"', '/board/do/(tenant|key)|="/board/keys"'
    assert found("viewer", f"{way}|{admins}") == found("operator", admins) == []
    looker.get("/keys", status=403)
    assert found("admin", admins) == paths
    assert len(found("admin", way)) >= 10
