"""Servers with further configuration: users with few rights, TLS, a Sentinel, a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from tests.support.absence import lacks
from tests.support.servers import Server, ServerName, find_binary, free_port
from tests.support.waiting import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
SLOTS = 16384


def required(name: ServerName) -> Path:
    """The server's program; without it the test is skipped, or fails on a CI machine."""
    found = find_binary(name)
    if found is None:
        lacks(f"{name}-server is not installed, so this was not tested on {name}")
    return found


class ServerWith(Server):
    """A plain server with further options."""

    def __init__(self, name: ServerName, folder: Path, *options: object) -> None:
        super().__init__(name, required(name), folder, aof=True)
        self._command += [str(option) for option in options]


class GuardedServer(Server):
    """The server of `deploy/`, with its users. Each user's password is its name."""

    def __init__(
        self,
        name: ServerName,
        folder: Path,
        users: Sequence[str],
        *,
        clients: Sequence[str] = (),
        batches: bool = False,
        options: Sequence[object] = (),
    ) -> None:
        super().__init__(name, required(name), folder, aof=True)
        variables = {f"PASSWORD_{user.upper()}": user for user in (*users, *clients)}
        variables |= {"SERVER": str(required(name)), "FOLDER": str(folder)}
        variables |= {"CLIENTS": " ".join(clients)}
        variables |= {"GATEWAY_BATCHES": "on"} if batches else {}
        self._command = ["env", *(f"{key}={value}" for key, value in variables.items())]
        self._command += [str(DEPLOY / "start-redis.sh"), "--port", str(self.port)]
        self._command += ["--bind", "127.0.0.1", "--dir", str(folder), *map(str, options)]

    def url_of(self, user: str) -> str:
        """The URL under which a user connects."""
        return f"redis://{user}:{user}@127.0.0.1:{self.port}"

    @property
    def _probe_url(self) -> str:
        return self.url_of("worker")


#: How long a server is away before its replica replaces it: never, unless a test has killed it.
#: A machine under load may stop a server for seconds.
NEVER_MS, SOON_MS = 600_000, 2000


class Sentinel(Server):
    """A Sentinel that watches the service ``yards`` with a quorum of one."""

    def __init__(self, name: ServerName, folder: Path, master: Server) -> None:
        super().__init__(name, required(name), folder)
        settings = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"sentinel monitor yards 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds yards {NEVER_MS}",
            "sentinel failover-timeout yards 3000",
            "sentinel auth-user yards sentinel",
            "sentinel auth-pass yards sentinel",
        ]
        path = folder / "sentinel.conf"
        path.write_text("\n".join(settings) + "\n")
        self._command = [str(required(name)), str(path), "--sentinel"]

    def start(self) -> None:
        """Start it, and have it act also after it was itself stopped for a while."""
        super().start()
        ask(self, "SENTINEL", "DEBUG", "TILT-TRIGGER", NEVER_MS)

    def master_port(self) -> int:
        """The port of the server that the Sentinel takes for the master."""
        with redis.Redis(port=self.port) as connection:
            found: Any = connection.sentinel_get_master_addr_by_name("yards")
        return int(found[1])

    def replace_the_dead(self) -> None:
        """Have the master replaced if it is dead."""
        ask(self, "SENTINEL", "SET", "yards", "down-after-milliseconds", SOON_MS)

    def wait_for_replica(self) -> None:
        """Wait until the Sentinel knows a replica that could replace the master."""
        with redis.Redis(port=self.port) as connection:

            def is_linked() -> bool:
                seen: Any = connection.sentinel_slaves("yards")
                return any(one["flags"] == "slave" for one in _texts(seen))

            eventually(is_linked, timeout_s=60.0)


def _texts(seen: Any) -> list[dict[str, str]]:
    """A Sentinel's view as text; redis-py returns texts or flags."""
    return [{str(key): _text(value) for key, value in dict(one).items()} for one in seen]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Cluster:
    """A Redis Cluster: masters that share the slots, with an optional replica of each."""

    def __init__(self, name: ServerName, folder: Path, *, replicas: bool) -> None:
        count = 6 if replicas else 3
        self.nodes = [self._node(name, folder / str(number)) for number in range(count)]
        self.masters, self.replicas = self.nodes[:3], self.nodes[3:]

    @staticmethod
    def _node(name: ServerName, folder: Path) -> ServerWith:
        folder.mkdir()
        options = ["--cluster-enabled", "yes", "--cluster-port", free_port()]
        options += ["--cluster-node-timeout", NEVER_MS, "--cluster-replica-validity-factor", 0]
        return ServerWith(name, folder, *options)

    @property
    def url(self) -> str:
        """The URL of all nodes, for `open_connection`."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def start(self) -> None:
        """Start the nodes, join them, and distribute the slots."""
        for node in self.nodes:
            node.start()
        edges = [round(number * SLOTS / len(self.masters)) for number in range(4)]
        for node, low, high in zip(self.masters, edges[:-1], edges[1:], strict=True):
            ask(node, "CLUSTER", "ADDSLOTSRANGE", low, high - 1)
        for node in self.nodes[1:]:
            first = self.nodes[0]
            ask(node, "CLUSTER", "MEET", "127.0.0.1", first.port, bus_port(first))
        eventually(lambda: all(self._knows_all(node) for node in self.nodes), timeout_s=60.0)
        for replica, master in zip(self.replicas, self.masters, strict=False):
            ask(replica, "CLUSTER", "REPLICATE", ask(master, "CLUSTER", "MYID").decode())
        eventually(lambda: all(self._is_well(node) for node in self.nodes), timeout_s=60.0)

    def _knows_all(self, node: Server) -> bool:
        return f"cluster_known_nodes:{len(self.nodes)}\r".encode() in ask(node, "CLUSTER", "INFO")

    def _is_well(self, node: Server) -> bool:
        is_linked = True
        if node in self.replicas:
            replication = ask(node, "INFO", "replication")
            is_linked = replication.get("master_link_status") == "up"
        return is_linked and b"cluster_state:ok" in ask(node, "CLUSTER", "INFO")

    def holder_of(self, slot: int) -> ServerWith:
        """The master of a slot."""
        return self.masters[min(slot * len(self.masters) // SLOTS, 2)]

    def fail_over(self, master: ServerWith) -> None:
        """Kill a master, and have the others replace it."""
        master.kill()
        for node in self.nodes:
            if node is not master:
                ask(node, "CONFIG", "SET", "cluster-node-timeout", SOON_MS)

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.kill()


def ask(server: Server, *command: object) -> Any:
    """Run one command on one server."""
    with redis.Redis(port=server.port, socket_timeout=30.0) as connection:
        run: Any = connection
        return run.execute_command(*command)


def bus_port(node: ServerWith) -> int:
    """A node's port for other nodes of its cluster."""
    command = node._command
    return int(command[command.index("--cluster-port") + 1])


class Certificates:
    """A new certificate authority and a certificate for 127.0.0.1, made by openssl."""

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"
        request, names = folder / "server.csr", folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        authority_key = folder / "ca.key"
        _run(*new, "-x509", "-subj", "/CN=authority", "-keyout", authority_key,
             "-out", self.authority)  # fmt: skip
        _run(*new, "-subj", "/CN=yard", "-keyout", self.key, "-out", request)
        _run("openssl", "x509", "-req", "-in", request, "-CA", self.authority, "-CAkey",
             authority_key, "-CAcreateserial", "-extfile", names, "-days", 30,
             "-out", self.certificate)  # fmt: skip


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)
