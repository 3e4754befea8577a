"""Requests for the pages about them: one with a secret prompt, failed ones, hostile ids."""

from __future__ import annotations

import re
from typing import Any

from tests.board.looking import Looker, text_of
from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.board.page import Actor, request_address
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import refusal
from tokenyard.protocol.wire import Request

PROMPT = "a secret prompt"
ANSWER = "a secret answer"
SEES = Actor("olga", "operator", shows_content=True)
#: Markup, control characters, right-to-left marks, separators, letters of other directions.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a/b/../c?d=e&f=g#h%2F%00+ ;",
    "\x00\x1b[2J\r\n\t\x7f\x9b",
    "\u202edlrow\u2066\u200f",
    "שלום/مرحبا",
    " blanks around ",
    "x" * 200,
    "{{ 7 * 7 }}{% raw %}",
    "\U0001f4a9" * 50,
)


def asking(request_id: str = "q", **fields: Any) -> Request:
    return make_request(request_id, client="ann", prompt=PROMPT, tokens=None, **fields)


def look(looker: Looker, request: Request) -> str:
    return looker.get(request_address(request.client, request.id))


def seen(looker: Looker, request: Request) -> str:
    return text_of(look(looker, request))


def fail(yard: PlayedYard, request: Request, reason: str = "POISONED: it kills engines") -> None:
    """End a request as a worker's crashes do, with a dead letter."""
    waiting = yard.submit(request)
    reply = refusal(request, Code.POISONED, reason)
    place = (waiting.intake, waiting.entry, request)
    yard.scripts.answer(yard.token, *place, reply, dead=reason)


def ids(page: str) -> list[str]:
    """The requests of a page, as their rows show them."""
    return [text_of(one) for one in re.findall(r'<th scope="row".*?</a>', page, re.DOTALL)]


def state_of(yard: PlayedYard, client: str, request_id: str) -> str:
    state = yard.connection.hget(yard.keys.ledger(client, request_id), "state")
    return (state or b"").decode()
