"""Notices that the yard's server is another one, or that its clock was set.

A replica that has become the server may lack the last writes. The ledgers may then disagree with
the workers: results and tokens are lost, requests wait again that a worker runs, and others lie on
its lane that it has answered. Its lease is the one fence that settles all of this: the worker loses
it, its lane is rescued as it is on the new server, and the worker joins again. A server that only
restarted has what it acknowledged, and fences no worker.

Leases and deadlines are times of the broker. When its clock is set, by NTP or because the yard goes
on with a replica on another host, all of them would be over at once, or hold for as long as the
step. The leader measures the broker's time by its own monotonic clock once a second. When it finds
a step, it corrects the leases, and remembers how far back each intake uses the old time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import redis

from tokenyard.clock import BrokerTime
from tokenyard.protocol.streams import position
from tokenyard.scripts import Scripts
from tokenyard.scripts.client import CLIENT_LEASE_MS

log = logging.getLogger("tokenyard.coordinator.failover")

#: Leases that one call corrects.
_AT_ONCE: Final = 1000
#: Steps that are remembered; requests that are older than all of them may expire early or late.
_REMEMBERED: Final = 100
_NEVER: Final = (-1, -1)


class FailoverDetector:
    """Compares the server with the one that the yard was on."""

    def __init__(self, scripts: Scripts) -> None:
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
            if not self._seen:  # once: permissions do not change often
                log.warning("a failover that loses writes will not be noticed: %s", error)
                self._seen = ("not permitted",)
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
        pipeline = self._scripts.yard.connection.pipeline(transaction=False)
        pipeline.get(self._scripts.keys.leader)
        pipeline.info("server", "stats", "replication", "cluster")
        _, info = pipeline.execute()
        return dict(info)


class ClockSteps:
    """The steps that one coordinator has noticed."""

    def __init__(self, scripts: Scripts, broker_time: BrokerTime) -> None:
        self._yard = scripts.yard
        self._scripts = scripts
        self._broker_time = broker_time
        self._is_new = True
        #: Each step in ms, with the last entry of each intake before it.
        self._steps: deque[tuple[float, Mapping[str, tuple[int, int]]]] = deque(maxlen=_REMEMBERED)

    def begin(self) -> None:
        """A term of leadership begins: the clock may have been set while nobody led."""
        self._is_new = True

    def run_once(self, token: str, intakes: Iterable[str], lease_ms: int) -> bool:
        """Follow a step, if one was measured; whether there was one.

        ``lease_ms`` is the length of the longest lease of a worker.
        """
        longest_ms = max(lease_ms, CLIENT_LEASE_MS)
        step_ms, age_ms = self._broker_time.take_step()
        # Everybody who lives has renewed a lease by the new clock since an old step.
        ahead_ms = step_ms if step_ms > 0 and age_ms < longest_ms else 0.0
        if step_ms or self._is_new:
            count = _AT_ONCE
            while count == _AT_ONCE:
                count = self._scripts.shift_leases(token, ahead_ms, longest_ms, _AT_ONCE)
            self._is_new = False
        if not step_ms:
            return False
        way = "ahead" if step_ms > 0 else "back"
        log.warning("the broker's clock was set %s by %.1f s", way, abs(step_ms) / 1000)
        self._steps.append((step_ms, self._newest(list(intakes))))
        return True

    def _newest(self, intakes: list[str]) -> dict[str, tuple[int, int]]:
        pipeline = self._yard.connection.pipeline(transaction=False)
        for intake in intakes:
            pipeline.xrevrange(self._yard.keys.intake(intake), count=1)
        found: list[Any] = pipeline.execute()
        return {
            intake: position(entries[0][0].decode())
            for intake, entries in zip(intakes, found, strict=True)
            if entries
        }

    def shift_ms(self, intake: str, entry: str) -> int:
        """What to add to the times of an entry, so that they are by the clock of today."""
        if not self._steps:
            return 0
        at = position(entry)
        return round(sum(step for step, last in self._steps if at <= last.get(intake, _NEVER)))

    def old_until(self, intake: str) -> list[tuple[str, int]]:
        """The last entries of an intake before each step, and the steps in ms."""
        found = [(last[intake], step) for step, last in self._steps if intake in last]
        return [(f"{at[0]}-{at[1]}", round(step)) for at, step in found]
