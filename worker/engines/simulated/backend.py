"""The backend of a worker process without models, for tests of the pool and of the yard."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path, PurePath
from typing import Final

from tokenyard import clock
from worker.engines import Engine, Memory, RankGroup, SensorReading
from worker.engines.connecting import connect
from worker.engines.crash_points import CrashPoint
from worker.engines.simulated.engine import (
    BROKEN,
    MAX_MODEL_LEN,
    SimulatedEngine,
    SpeedModel,
    read_weights,
)
from worker.engines.stopwatch import Stopwatch
from worker.models import ModelSpec

#: A model whose path ends in one of these leaks memory: 16 MiB, or 1 GiB.
LEAKY: Final = "leaky"
CLINGING: Final = "clinging"
_KEPT: Final = {LEAKY: 16 * 1024**2, CLINGING: 1024**3}
_MEMORY: Final = Memory(host=64 * 1024**2)


class SimulatedBackend:
    """See `worker.engines.Backend`. Loads every model except one with the path `BROKEN`.

    A load takes ``load_s`` seconds and all else no time. Models take no memory, unless they leak.
    """

    def __init__(
        self, *, speed: SpeedModel | None = None, load_s: float = 0.0, crash_point: str = ""
    ) -> None:
        """Each model replaces the batch size of ``speed``. Raises the errors of `CrashPoint`."""
        self._speed = speed or SpeedModel()
        self._load_s = load_s
        self._crash = CrashPoint(crash_point)  # one count for all models
        self._kept: list[bytearray] = []

    def warm_up(self) -> dict[str, float]:
        """Do nothing but pass crash points; returns seconds by phase."""
        self._crash.kill_if_due("warming")
        self._crash.kill_if_due("illegal")
        self._crash.kill_if_due("stall")
        return {"import": 0.0}

    def load(self, spec: ModelSpec, group: RankGroup | None = None, weights: str = "") -> Engine:
        """Pretend to load a model, and wait for its group."""
        stopwatch = Stopwatch()
        with stopwatch.phase("weights"):
            self._crash.kill_if_due("loading")
            clock.sleep(self._load_s)
            if spec.path == BROKEN:
                raise RuntimeError("broken model")
            read_weights(weights)
        self._kept.append(bytearray(_KEPT.get(PurePath(spec.path).name, 0)))
        release = None
        if group is not None:
            with stopwatch.phase("group"):
                release = gather(group)
        return SimulatedEngine(
            spec.name,
            speed=replace(self._speed, max_num_seqs=spec.max_num_seqs),
            max_model_len=spec.max_model_len or MAX_MODEL_LEN,
            adapters=[adapter.name for adapter in spec.adapters],
            crash_point=self._crash,
            path=spec.path,
            revision=spec.revision,
            weights=weights,
            phases_s=stopwatch.phases_s,
            release=release,
        )

    def attend(self, group: RankGroup) -> None:
        """Stay connected to the leader until it releases this process.

        Raises `TimeoutError` if there is no leader, and `ConnectionError` if it dies.
        """
        with connect(group.address, GATHER_S) as leader:
            self._crash.kill_if_due("attached")
            try:
                leader.recv_bytes()
            except (EOFError, OSError) as error:  # the kernel closes the socket of a dead leader
                raise ConnectionError("the leader of the group is gone") from error

    def memory(self) -> Memory:
        """A constant, plus the leaks."""
        return Memory(host=_MEMORY.host + sum(map(len, self._kept)))

    def read_sensors(self) -> SensorReading:
        """Nothing: there is no device."""
        return SensorReading()


# A group of simulated processes: each follower keeps a connection to the leader.

#: Longest wait of the processes of a group for each other.
GATHER_S: Final = 60.0
_GOODBYE: Final = b"."


def gather(group: RankGroup) -> Callable[[], None]:
    """Wait for the followers of this leader; returns a function that releases them.

    The function is idempotent. Raises `TimeoutError` if a follower does not connect.
    """
    followers: list[Connection] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(GATHER_S)
        listener.bind(group.address)
        listener.listen()
        try:
            for _ in range(group.size - 1):
                accepted, _ = listener.accept()
                accepted.setblocking(True)
                followers.append(Connection(accepted.detach()))
        finally:
            Path(group.address).unlink()

    def release() -> None:
        while followers:
            with followers.pop() as follower:
                follower.send_bytes(_GOODBYE)

    return release
