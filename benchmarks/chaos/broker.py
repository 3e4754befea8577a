"""The server of a chaos run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import redis

from benchmarks.yard import ServerName, server_named
from tokenyard.process.embedded_broker import EmbeddedBroker


class Broker:
    """A server that keeps its port and its append-only file across restarts.

    The file is written and synced before each reply (``appendfsync always``). With ``everysec``,
    the embedded broker's default, a server killed during a sync may lose up to two seconds of
    acknowledged writes: it postpones the write until the sync ends (aof.c,
    ``aof_flush_postponed_start``), but not the replies. The file is never rewritten, because the
    checker reads it.
    """

    def __init__(self, name: ServerName, data_dir: Path) -> None:
        self._server = server_named(name)
        self.data_dir = data_dir
        self._broker = EmbeddedBroker(data_dir, server=self._server)
        self._port = 0

    @property
    def url(self) -> str:
        """Its Redis URL, which never changes."""
        return self._broker.url

    @property
    def pid(self) -> int:
        """Its process id; 0 while it is down."""
        return self._broker.pid

    def start(self) -> None:
        """Start it with the same port and file, and wait until it answers."""
        if self._broker.is_running:
            return
        self._broker = EmbeddedBroker(self.data_dir, port=self._port, server=self._server)
        self._broker.start()
        with self._connection() as connection:
            self._port = connection.connection_pool.connection_kwargs["port"]
            connection.config_set("appendfsync", "always")
            connection.config_set("auto-aof-rewrite-percentage", 0)

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self._broker.stop()

    def stop(self) -> None:
        """Send SIGTERM; idempotent."""
        self._broker.stop()

    def cut_connections(self) -> None:
        """Cut all connections, whatever is in transit."""
        with self._connection() as connection:
            connection.client_kill_filter(_type="normal", skipme=True)

    def flush_scripts(self) -> None:
        """Flush the script cache."""
        with self._connection() as connection:
            connection.script_flush()

    def _connection(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=10.0)
