"""Settings of the board, for a gateway that serves it and for a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

ContentRule = Literal["nobody", "admin", "operator", "viewer"]

#: Names of a loopback host, in a Host header.
LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions:
    """What the board needs to know, wherever it runs."""

    #: Without keys everybody who reaches it is an admin: on loopback only.
    needs_keys: bool
    #: The least role that sees prompts and answers.
    shows_content_to: ContentRule = "nobody"
    #: Names by which browsers reach it, beside those of loopback; () with keys: any.
    hosts: tuple[str, ...] = ()
    #: How long a login lasts.
    session_s: int = 12 * 3600
    #: Whether browsers reach it by TLS, so that cookies are sent by TLS only.
    has_tls: bool = False
