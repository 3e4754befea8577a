"""Settings of the board, for a gateway that serves it and for a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

from tokenyard.protocol.http_settings import (
    MAX_STREAMS,
    SESSION_S,
    TLS_PREFIX,
    ContentRule,
    HttpSettings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions:
    """What the board needs to know, wherever it runs."""

    #: Without keys everybody who reaches it is an admin: on loopback only.
    needs_keys: bool
    #: The least role that sees prompts and answers.
    shows_content_to: ContentRule = "nobody"
    #: Names by which browsers reach it, beside those of loopback; () with keys: any. One that
    #: begins with ``https://`` is reached by TLS, which may be a proxy's.
    hosts: tuple[str, ...] = ()
    #: How long a login lasts.
    session_s: int = SESSION_S
    #: Whether its own server speaks TLS, so that cookies are sent by TLS only.
    has_tls: bool = False
    #: Open pages that are kept up to date; more are asked to come back.
    max_streams: int = MAX_STREAMS
    #: An open page is asked to connect again after so long.
    stream_s: float = 300.0
    #: Reads and actions at once; more wait, for a time at most.
    max_reads: int = 4
    wait_s: float = 10.0

    @classmethod
    def of(cls, settings: HttpSettings) -> BoardOptions:
        """Those that follow from how a program that serves it is reached."""
        return cls(
            needs_keys=settings.needs_keys,
            hosts=settings.hosts if settings.needs_keys else (settings.own_name,),
            has_tls=settings.tls_cert is not None,
        )

    def is_by_tls(self, name: str) -> bool:
        """Whether a browser that calls it so has come by TLS, as far as is known."""
        return self.has_tls or TLS_PREFIX + name in self.hosts
