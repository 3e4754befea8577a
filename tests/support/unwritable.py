"""Real servers that take no writes: out of memory, with a full disk, or as a replica."""

from __future__ import annotations

import resource
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import redis

from tests.support.brokers import ServerWith, ask
from tests.support.servers import ServerName
from tests.support.waiting import eventually

Ailment = Literal["memory", "disk", "snapshot", "replica", "replicas"]

#: The first word of Redis's error for each ailment.
CODES: Final[dict[Ailment, str]] = {
    "memory": "OOM",
    "disk": "MISCONF",
    "snapshot": "MISCONF",
    "replica": "READONLY",
    "replicas": "NOREPLICAS",
}


class Ailing(ServerWith):
    """A server that a test can make unwritable in several ways, and repair."""

    def __init__(self, name: ServerName, folder: Path) -> None:
        # With `appendfsync always` a full disk ends the server instead of stopping writes.
        options = ("--appendfsync", "everysec", "--enable-protected-configs", "yes")
        super().__init__(name, folder, *options)
        # A write beyond the file limit fails, as on a full disk, instead of ending the process.
        self._command = ["sh", "-c", 'trap "" XFSZ; exec "$0" "$@"', *self._command]
        self._folder = folder

    @property
    def _pid(self) -> int:
        assert self._process
        return self._process.pid

    def fall_ill(self, ailment: Ailment) -> None:
        """Take no writes from now on."""
        match ailment:
            case "memory":
                ask(self, "CONFIG", "SET", "maxmemory", "1")
            case "disk":
                self._limit_files(0)
                with suppress(redis.ResponseError):  # another write has failed before
                    ask(self, "SET", "one-that-cannot-be-kept", "x")
                eventually(lambda: self._says("aof_last_write_status:err"), timeout_s=20.0)
            case "snapshot":
                gone = self._folder / "gone"
                gone.mkdir()
                ask(self, "CONFIG", "SET", "dir", str(gone))
                shutil.rmtree(gone)
                ask(self, "CONFIG", "SET", "save", "900 1")
                ask(self, "BGSAVE")
                eventually(lambda: self._says("rdb_last_bgsave_status:err"), timeout_s=20.0)
            case "replica":
                ask(self, "REPLICAOF", "127.0.0.1", "1")  # no server listens there
            case "replicas":
                ask(self, "CONFIG", "SET", "min-replicas-to-write", "1")

    def recover(self, ailment: Ailment) -> None:
        """Take writes again."""
        match ailment:
            case "memory":
                ask(self, "CONFIG", "SET", "maxmemory", "0")
            case "disk":
                self._limit_files(resource.RLIM_INFINITY)
                eventually(lambda: self._says("aof_last_write_status:ok"), timeout_s=20.0)
            case "snapshot":
                ask(self, "CONFIG", "SET", "save", "")
                ask(self, "CONFIG", "SET", "dir", str(self._folder))
            case "replica":
                ask(self, "REPLICAOF", "NO", "ONE")
            case "replicas":
                ask(self, "CONFIG", "SET", "min-replicas-to-write", "0")

    def _limit_files(self, most_bytes: int) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))

    def _says(self, line: str) -> bool:
        key, _, value = line.partition(":")
        return bool(ask(self, "INFO", "persistence")[key] == value)
