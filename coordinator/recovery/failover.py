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

from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.failover")


class FailoverDetector:
    """Compares the server with the one that the yard was on."""

    def __init__(self, connection: redis.Redis, scripts: Scripts) -> None:
        self._connection = connection
        self._scripts = scripts
        #: Token, server and its replication id of the last comparison.
        self._seen: tuple[str, ...] = ()

    def check(self, token: str) -> bool:
        """Fence all workers where the server is a promoted replica; whether it is another one.

        That is, another than before in this term, or one whose workers were fenced.
        """
        try:
            info = self._info()
        except redis.exceptions.NoPermissionError as error:
            self._warn(error)
            return False
        server, replication = str(info.get("run_id", "")), str(info.get("master_replid", ""))
        if not server or (token, server, replication) == self._seen:
            return False
        # In the life of this server process: one that restarts begins at none.
        received = int(info.get("total_net_repl_input_bytes", 0))
        # A slot of a Cluster also moves to nodes that have replaced others long ago.
        is_cluster = bool(info.get("cluster_enabled"))
        fenced = self._scripts.recognize(
            token,
            server,
            was_replica=received > 0,
            replication=replication,
            replaces=str(info.get("master_replid2", "")) if is_cluster else "",
        )
        is_another = self._seen[:1] == (token,) and self._seen[1] != server
        self._seen = (token, server, replication)
        if fenced:
            log.warning("a replica took the place of the server; %d workers join again", fenced)
        return is_another or fenced > 0

    def _info(self) -> dict[str, Any]:
        """Of the server that has the yard: on a Cluster, a command with a key leads there."""
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.get(self._scripts.keys.leader)
        pipeline.info("server", "stats", "replication", "cluster")
        _, info = pipeline.execute()
        return dict(info)

    def _warn(self, error: redis.RedisError) -> None:
        """Once: permissions do not change often."""
        if not self._seen:
            log.warning("a failover that loses writes will not be noticed: %s", error)
            self._seen = ("not permitted",)
