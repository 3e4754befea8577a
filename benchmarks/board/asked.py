"""What a page asks the broker for: its commands, and the keys in them, as MONITOR shows them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import redis


@dataclass(frozen=True, slots=True)
class Asked:
    """The commands of one process, without those inside scripts."""

    commands: int
    keys: int  # in all commands together


class Watcher:
    """Counts what one process asks of a broker."""

    def __init__(self, url: str, pid: int) -> None:
        self._connection: Any = redis.Redis.from_url(url)
        self._process = psutil.Process(pid)

    def during(self, call: Callable[[], object], prefix: str) -> Asked:
        """What is asked in the course of a call; keys are the words that begin with ``prefix``."""
        end = secrets.token_hex(8)
        heard: list[dict[str, Any]] = []
        is_listening = threading.Event()

        def listen() -> None:
            with self._connection.monitor() as monitor:
                is_listening.set()
                for one in monitor.listen():
                    if end in one["command"]:
                        return
                    heard.append(one)

        thread = threading.Thread(target=listen)
        thread.start()
        is_listening.wait()
        call()
        ports = {str(one.laddr.port) for one in self._process.net_connections("tcp")}
        self._connection.echo(end)
        thread.join()
        ours = [one["command"] for one in heard if str(one["client_port"]) in ports]
        words = [word for command in ours for word in command.split()]
        return Asked(len(ours), sum(word.strip('"').startswith(prefix) for word in words))
