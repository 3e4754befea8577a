"""What the programs that serve HTTP have in common."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from tokenyard.protocol.settings import (
    AtLeastOne,
    Bound,
    NotNegative,
    Positive,
    ProgramSettings,
    default_name,
)

KeyRule = Literal["auto", "required", "off"]
Port = Annotated[
    int, Bound(lambda port: 0 <= port < 2**16, "must be 0 to 65535; 0 is any free one")
]
#: Names of a loopback host, in a Host header.
LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
#: A host that browsers reach by TLS begins with it.
TLS_PREFIX: Final = "https://"
_HOST: Final = re.compile(r"(https://)?([a-z0-9_][a-z0-9_.-]*|\[[0-9a-f:.]+\])")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings(ProgramSettings):
    """Where a program listens, and the bounds of its connections."""

    #: Where it listens. Keys are required on any address but loopback.
    host: str = "127.0.0.1"
    port: Port
    #: Names by which it is reached beside its address; those with "https://" by TLS.
    hosts: tuple[str, ...] = ()
    #: Whether requests need a key; ``auto``: on any address but loopback.
    keys: KeyRule = "auto"
    #: Connections; more are answered with 503.
    max_connections: AtLeastOne
    #: A request must be received within this time, and a second more for each 16 KiB of it.
    receive_s: Positive = 30.0
    #: A client that reads nothing of its answer for so long is cut off.
    send_s: Positive = 60.0
    #: A connection without a request is closed after so long; more than a load balancer keeps it.
    idle_s: Positive = 75.0
    #: PEM files; without them TLS is the proxy's.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    #: On SIGTERM, answers under way may finish for so long; then streams end.
    grace_s: NotNegative[float]

    @property
    def needs_keys(self) -> bool:
        """Whether a request without a valid key is refused."""
        return self.keys == "required" or (self.keys == "auto" and not self._is_local)

    @property
    def own_name(self) -> str:
        """Its address as a Host header has it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def _is_local(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def _shared_errors(self) -> Iterator[str]:
        yield from super(HttpSettings, self)._shared_errors()  # as in `ServiceSettings`
        if self.keys == "off" and not self._is_local:
            yield "keys: may be off on loopback only; leave the setting out, or set host 127.0.0.1"
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "tls_cert, tls_key: give both or none"
        for label in ("tls_cert", "tls_key"):
            file = getattr(self, label)
            if file is not None and not file.is_file():
                yield f"{label}: no file at {file}"
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                yield f"hosts: {host!r} is not like api.example.com or https://api.example.com"


# Settings of the board where it has a process of its own, and those that gateways share.

#: The least role that sees prompts and answers.
ContentRule = Literal["nobody", "admin", "operator", "viewer"]
#: How long a login lasts.
SESSION_S: Final = 12 * 3600
MAX_STREAMS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSettings(HttpSettings):
    """What `tokenyard board` needs to know. Units stand in the names."""

    name: str = field(default_factory=lambda: default_name("board"))
    port: Port = 8001
    grace_s: NotNegative[float] = 5.0
    max_connections: AtLeastOne = 1_000
    #: The least role that sees prompts and answers.
    content: ContentRule = "nobody"
    session_s: AtLeastOne = SESSION_S
    #: Open pages that are kept up to date.
    max_streams: AtLeastOne = MAX_STREAMS
    #: Reads and actions at once; more wait for so long at most.
    max_reads: AtLeastOne = 4
    wait_s: Positive = 10.0

    def _errors(self) -> Iterator[str]:
        if self.hosts and not self.needs_keys:
            yield (
                "hosts: without keys everybody who reaches the board is an admin, so it is known on"
                " loopback only; set keys required"
            )
