"""A master with a replica, watched by a Sentinel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import redis

from tests.support.brokers import Cluster, GuardedServer, Sentinel
from tests.support.servers import Server, ServerName, free_port
from tests.support.waiting import eventually

Keep = Callable[[Server | Cluster], None]
USERS = ("client", "coordinator", "worker", "admin", "replica", "sentinel", "default")


def settle(url: str) -> None:
    """Let the replica take over all that was written so far; the master writes no more."""
    with redis.Redis.from_url(url) as connection:
        connection.client_pause(10_000, all=False)
        assert connection.wait(1, 10_000) == 1


class Watched:
    """A master with a replica and a Sentinel, all with the users of `deploy/users.acl`."""

    def __init__(self, name: ServerName, folder: Path, keep: Keep) -> None:
        places = [folder / part for part in ("first", "second", "sentinel")]
        for place in places:
            place.mkdir()
        follow = ["--masteruser", "replica", "--masterauth", "replica"]
        follow += ["--repl-diskless-sync-delay", "0"]
        self.master = GuardedServer(name, places[0], USERS, options=follow)
        keep(self.master)
        more = ["--replicaof", f"127.0.0.1 {self.master.port}"]
        self.replica = GuardedServer(name, places[1], USERS, options=[*follow, *more])
        keep(self.replica)
        self.sentinel = Sentinel(name, places[2], self.master)
        keep(self.sentinel)
        self.sentinel.wait_for_replica()

    def url(self, user: str) -> str:
        """Two Sentinels, of which only the second lives."""
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}"
        return f"redis+sentinel://{user}:{user}@{hosts}/yards"

    def part(self) -> None:
        """From now on the replica gets nothing of what the master writes, and had all before."""
        with redis.Redis.from_url(self.master.url_of("default")) as master:
            master.client_pause(10_000, all=False)
            assert master.wait(1, 10_000) == 1
            master.execute_command("ACL", "SETUSER", "replica", "off")
            master.client_kill_filter(_type="replica")
            eventually(lambda: not master.info("replication")["connected_slaves"])
            master.client_unpause()

    def fail_over(self) -> None:
        """The master dies, and the replica takes its place."""
        self.master.kill()
        port = self.replica.port
        eventually(lambda: self.sentinel.master_port() == port, timeout_s=30)
