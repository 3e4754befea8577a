"""Detects that a replica has become the yard's server, which may lack the last writes.

The ledgers may then disagree with the workers: results and tokens are lost, requests wait again
that a worker runs, and others lie on its lane that it has answered. Its lease is the one fence that
settles all of this: the worker loses it, its lane is rescued as it is on the new server, and the
worker joins again. A server that only restarted has what it acknowledged, and fences no worker.
"""

from __future__ import annotations

import logging
from typing import Any

import redis

from coordinator.leadership import LostLeadership
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.failover")


class FailoverDetector:
    """Compares the server with the one that the yard was on."""

    def __init__(self, connection: redis.Redis, scripts: Scripts) -> None:
        self._connection = connection
        self._scripts = scripts
        self._seen = ""  # token and server of the last comparison

    def check(self, token: str) -> bool:
        """Fence all workers where the server is a promoted replica; whether it is another one.

        That is, another than before in this term, or one whose workers were fenced.

        Raises `LostLeadership` where the yard has another leader.
        """
        try:
            server = str(self._info("server").get("run_id", ""))
            if not server or f"{token} {server}" == self._seen:
                return False
            # In the life of this server process: one that restarts begins at none.
            received = int(self._info("stats").get("total_net_repl_input_bytes", 0))
        except redis.exceptions.NoPermissionError as error:
            self._warn(error)
            return False
        fenced = self._scripts.recognize(token, server, was_replica=received > 0)
        is_another = self._seen.startswith(f"{token} ")
        self._seen = f"{token} {server}"
        if fenced < 0:
            raise LostLeadership
        if fenced:
            log.warning("a replica took the place of the server; %d workers join again", fenced)
        return is_another or fenced > 0

    def _info(self, section: str) -> dict[str, Any]:
        found: Any = self._connection.info(section)
        return dict(found)

    def _warn(self, error: redis.RedisError) -> None:
        """Once: permissions do not change often."""
        if not self._seen:
            log.warning("a failover that loses writes will not be noticed: %s", error)
            self._seen = "not permitted"
