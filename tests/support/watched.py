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
PAUSE_MS = 60_000


def settle(url: str) -> None:
    """Pause the writes of the master at a URL, and wait until the replica has all of them."""
    with redis.Redis.from_url(url) as connection:
        level(connection)


def level(master: redis.Redis) -> None:
    """Pause a master's writes, and wait until the replica has all of them."""
    master.client_pause(PAUSE_MS, all=False)

    # Not WAIT: it covers only the writes of this connection, which has none.
    def is_level() -> bool:
        seen = master.info("replication")
        return bool(seen["slave0"]["offset"] >= seen["master_repl_offset"])

    eventually(is_level, timeout_s=PAUSE_MS / 2000)


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
        """The URL of two Sentinels, of which only the second runs."""
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}"
        return f"redis+sentinel://{user}:{user}@{hosts}/yards"

    def part(self) -> None:
        """Cut the replica off once it has all writes of the master so far."""
        with redis.Redis.from_url(self.master.url_of("default")) as master:
            level(master)
            master.execute_command("ACL", "SETUSER", "replica", "off")
            master.client_kill_filter(_type="replica")
            eventually(lambda: not master.info("replication")["connected_slaves"])
            master.client_unpause()

    def fail_over(self) -> None:
        """Kill the master, and wait until the replica has replaced it."""
        self.master.kill()
        self.sentinel.replace_the_dead()
        port = self.replica.port
        eventually(lambda: self.sentinel.master_port() == port, timeout_s=60)
