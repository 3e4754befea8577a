"""Notices that a replica has become the yard's server, which may lack the last writes.

What a worker has in hand is then not what the ledgers say: results and tokens were taken back,
requests wait again that it runs, and others lie on its lane that it has answered. Its lease is the
one fence that settles all of this at once: it loses it, its lane is rescued as it stands there, and
it joins anew. A server that was only restarted has what it acknowledged, and fences nobody.
"""

from __future__ import annotations

import logging
from typing import Any

import redis

from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.promotion")


class FailoverDetector:
    """Compares the server with the one that the yard was on."""

    def __init__(self, connection: redis.Redis, scripts: Scripts) -> None:
        self._connection = connection
        self._scripts = scripts
        self._seen = ""  # the server that was compared last, and by whom

    def check(self, token: str) -> int:
        """Fence all workers where the server is a promoted replica; how many, or -1: deposed."""
        try:
            server = str(self._info("server").get("run_id", ""))
            if not server or f"{token} {server}" == self._seen:
                return 0
            # In the life of this process: one that restarts begins at none.
            received = int(self._info("stats").get("total_net_repl_input_bytes", 0))
        except redis.exceptions.NoPermissionError as error:
            self._warn(error)
            return 0
        fenced = self._scripts.recognize(token, server, was_replica=received > 0)
        self._seen = f"{token} {server}"
        if fenced > 0:
            log.warning("a replica took the place of the server; %d workers join anew", fenced)
        return fenced

    def _info(self, section: str) -> dict[str, Any]:
        found: Any = self._connection.info(section)
        return dict(found)

    def _warn(self, error: redis.RedisError) -> None:
        """Once: rights do not change often."""
        if not self._seen:
            log.warning("a failover that loses writes will not be noticed: %s", error)
            self._seen = "not permitted"
