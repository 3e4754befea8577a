"""What a request brings, within bounds: the query, a form, and the page to go back to."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode

from starlette.requests import Request

from tokenyard.board.page import MAX_PARAMETER, Parameters
from tokenyard.protocol.errors import BadInput

#: Where the board lies on its server.
ROOT: Final = "/board"
_FORM: Final = "application/x-www-form-urlencoded"
#: Most bytes and fields of a form.
_MOST_BYTES: Final = 256 * 1024
_MOST_FIELDS: Final = 2_000
#: A page of the board as a browser asks for it.
_PAGE: Final = re.compile(r"/board/[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*")


def read_query(request: Request) -> dict[str, list[str]]:
    """Parameters of the query and the path; those of the path count. Raises `BadInput`."""
    values = _bounded(request.url.query)
    return values | {name: [str(value)] for name, value in request.path_params.items()}


async def read_form(request: Request) -> dict[str, list[str]]:
    """The fields of a form; raises `BadInput`."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise BadInput(f"send the form as {_FORM}")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise BadInput(f"the form has more than {_MOST_BYTES} bytes: select fewer at once")
    return _bounded(body.decode(errors="replace"))


def read_back(given: Parameters) -> str:
    """The page to go back to, without what was said there: only one of the board."""
    path, _, query = given.text("back").partition("?")
    if not (_PAGE.fullmatch(path) and _PAGE.fullmatch(f"{ROOT}/?{query}")) or "//" in path:
        return ROOT + "/"
    if any(unquote(part) in {".", ".."} for part in path.split("/")):
        return ROOT + "/"
    kept = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != "done"]
    return f"{path}?{urlencode(kept)}" if kept else path


def with_done(back: str, entry: str) -> str:
    """The page, which then says what has happened."""
    return f"{back}{'&' if '?' in back else '?'}{urlencode({'done': entry})}"


def _bounded(text: str) -> dict[str, list[str]]:
    try:
        found = parse_qs(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise BadInput(f"more than {_MOST_FIELDS} fields: select fewer at once") from error
    if any(len(value) > MAX_PARAMETER for values in found.values() for value in values):
        raise BadInput(f"a field has more than {MAX_PARAMETER} characters")
    return found
