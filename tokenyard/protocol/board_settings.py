"""Settings of the board where it has a process of its own, and those that gateways share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from tokenyard.protocol.http_settings import HttpSettings
from tokenyard.protocol.settings import default_name

#: The least role that sees prompts and answers.
ContentRule = Literal["nobody", "admin", "operator", "viewer"]
#: How long a login lasts.
SESSION_S: Final = 12 * 3600
MAX_STREAMS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSettings(HttpSettings):
    """What `tokenyard board` needs to know. Units stand in the names."""

    name: str = field(default_factory=lambda: default_name("board"))
    port: int = 8001
    grace_s: float = 5.0
    max_connections: int = 1_000
    #: The least role that sees prompts and answers.
    content: ContentRule = "nobody"
    session_s: int = SESSION_S
    #: Open pages that are kept up to date.
    max_streams: int = MAX_STREAMS
    #: Reads and actions at once; more wait for so long at most.
    max_reads: int = 4
    wait_s: float = 10.0

    def _errors(self) -> Iterator[str]:
        yield from self._http_errors()
        if self.hosts and not self.needs_keys:
            yield (
                "hosts: without keys everybody who reaches the board is an admin, so it is known on"
                " loopback only; set keys required"
            )
        for label in ("session_s", "max_streams", "max_reads", "wait_s"):
            if getattr(self, label) <= 0:
                yield f"{label}: must be positive"
