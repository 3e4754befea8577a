"""Settings of a gateway."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tokenyard.protocol.settings import ProgramSettings, default_name

KeyRule = Literal["auto", "required", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(ProgramSettings):
    """What a gateway needs to know. Units stand in the names."""

    name: str = field(default_factory=lambda: default_name("gateway"))
    #: Where it listens. Keys are required on any address but loopback.
    host: str = "127.0.0.1"
    port: int = 8000
    #: Whether requests need a key; ``auto``: on any address but loopback.
    keys: KeyRule = "auto"
    #: How long an idempotency key is known, and a stream can be taken up again.
    record_ttl_s: int = 86_400
    max_body_bytes: int = 4 * 1024 * 1024
    #: Folder of files and batches, which all gateways and batch workers share, or a bucket in its
    #: place: "s3://bucket/prefix". Without either there are no files and no batches.
    files_dir: Path | None = None
    files_url: str = ""
    max_file_bytes: int = 512 * 1024 * 1024
    #: Connections; more are answered with 503.
    max_connections: int = 10_000
    #: A request must be received within this time, and a second more for each 16 KiB of it.
    receive_s: float = 30.0
    #: A client that reads nothing of its answer for so long is cut off.
    send_s: float = 60.0
    #: A connection without a request is closed after so long; more than a load balancer keeps it.
    idle_s: float = 75.0
    #: PEM files; without them TLS is the proxy's.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    #: Silence on a stream after which a comment is sent.
    keep_alive_s: float = 15.0
    #: On SIGTERM, answers under way may finish for so long; then streams end, to be taken up again.
    grace_s: float = 30.0
    #: Requests are refused where no coordinator has led for so long; a failover takes seconds.
    without_leader_s: float = 10.0
    #: Pause between two looks at the yard's models.
    refresh_s: float = 1.0
    #: Where models lie on this machine, if not where hosts have them: "name=path".
    model_paths: tuple[str, ...] = ()
    #: Whether Python code that comes with a model may run here, if the models file trusts it, too.
    trust_remote_code: bool = False

    @property
    def paths(self) -> dict[str, str]:
        """`model_paths` by name."""
        pairs = (each.partition("=") for each in self.model_paths)
        return {name: path for name, _, path in pairs}

    @property
    def needs_keys(self) -> bool:
        """Whether a request without a valid key is refused."""
        return self.keys == "required" or (self.keys == "auto" and not self._is_local)

    @property
    def _is_local(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def _errors(self) -> Iterator[str]:
        if not 0 <= self.port < 2**16:
            yield "port: must be 0 to 65535; 0 is any free one"
        times = (
            "receive_s",
            "send_s",
            "idle_s",
            "record_ttl_s",
            "keep_alive_s",
            "without_leader_s",
            "refresh_s",
        )
        sizes = ("max_body_bytes", "max_file_bytes", "max_connections")
        for label in (*times, *sizes):
            if getattr(self, label) <= 0:
                yield f"{label}: must be positive"
        if self.grace_s < 0:
            yield "grace_s: must not be negative"
        if self.files_url and self.files_dir is not None:
            yield "files_dir, files_url: give one of them"
        if self.files_url and not re.fullmatch("s3://[^/]+(/.*)?", self.files_url):
            yield "files_url: must be like s3://bucket/prefix"
        yield from self._access_errors()

    def _access_errors(self) -> Iterator[str]:
        if self.keys == "off" and not self._is_local:
            yield "keys: may be off on loopback only; leave the setting out, or set host 127.0.0.1"
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "tls_cert, tls_key: give both or none"
        for label in ("tls_cert", "tls_key"):
            file = getattr(self, label)
            if file is not None and not file.is_file():
                yield f"{label}: no file at {file}"
        for each in self.model_paths:
            name, _, path = each.partition("=")
            if not name or not path:
                yield f"model_paths: {each!r} is not name=path"
