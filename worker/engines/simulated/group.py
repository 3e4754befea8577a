"""A group of simulated processes: each follower keeps a connection to the leader."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tokenyard import clock
from worker.engines import RankGroup

#: Longest wait of the processes of a group for each other.
GATHER_S: Final = 60.0
_PAUSE_S: Final = 0.01  # between two attempts to connect
_GOODBYE: Final = b"."


def gather(group: RankGroup) -> Callable[[], None]:
    """Wait for the followers of this leader; returns a function that releases them.

    The function is idempotent. Raises `TimeoutError` if a follower does not connect.
    """
    followers: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(GATHER_S)
        listener.bind(group.address)
        listener.listen()
        try:
            followers.extend(listener.accept()[0] for _ in range(group.size - 1))
        finally:
            Path(group.address).unlink()

    def release() -> None:
        while followers:
            with followers.pop() as follower:
                follower.sendall(_GOODBYE)

    return release


def attend(group: RankGroup, attached: Callable[[], None]) -> None:
    """Stay connected to the leader until it releases this process.

    Calls ``attached`` once connected. Raises `TimeoutError` if there is no leader, and
    `ConnectionError` if it dies.
    """
    with _connect(group.address) as leader:
        attached()
        leader.settimeout(None)  # until the unload; the kernel closes the socket of a dead leader
        if leader.recv(1) != _GOODBYE:
            raise ConnectionError("the leader of the group is gone")


def _connect(address: str) -> socket.socket:
    until = clock.monotonic() + GATHER_S
    while True:
        leader = socket.socket(socket.AF_UNIX)
        leader.settimeout(GATHER_S)
        try:
            leader.connect(address)
            return leader
        except (FileNotFoundError, ConnectionRefusedError):
            leader.close()  # the leader does not listen yet
            if clock.monotonic() > until:
                raise TimeoutError(f"no leader at {address} within {GATHER_S} s") from None
            clock.sleep(_PAUSE_S)
