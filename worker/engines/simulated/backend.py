"""The backend of a worker process without models, for tests of the pool and of the yard."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Final

from tokenyard import clock
from worker.engines import Engine, EngineInfo, Memory, RankGroup, SensorReading, Unsupported
from worker.engines.crash_points import CrashPoint
from worker.engines.simulated.engine import SimulatedEngine
from worker.engines.simulated.speed import SpeedModel
from worker.engines.stopwatch import Stopwatch
from worker.models import ModelSpec

#: A model with this path, or weights in a folder of this name, cannot be loaded.
BROKEN: Final = "broken"
#: Weights in a folder of this name pass `check_weights`, but cannot be loaded.
CORRUPT: Final = "corrupt"
#: A model whose path ends in one of these leaks memory: 16 MiB, or 1 GiB.
LEAKY: Final = "leaky"
CLINGING: Final = "clinging"
_KEPT: Final = {LEAKY: 16 * 1024**2, CLINGING: 1024**3}
_MEMORY: Final = Memory(host=64 * 1024**2)


class SimulatedBackend:
    """See `worker.engines.Backend`. Loads every model except one whose path is `BROKEN`.

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
            _read_weights(weights)
        self._kept.append(bytearray(_KEPT.get(PurePath(spec.path).name, 0)))
        release = _nobody
        if group is not None:
            with stopwatch.phase("group"):
                release = gather(group)
        return _Loaded(spec, self._speed, self._crash, stopwatch.phases_s, release, weights)

    def attend(self, group: RankGroup) -> None:
        """Wait until the leader releases this process; raises `ConnectionError` if it dies."""
        attend(group, lambda: self._crash.kill_if_due("attached"))

    def memory(self) -> Memory:
        """A constant, plus the leaks."""
        return Memory(host=_MEMORY.host + sum(map(len, self._kept)))

    def read_sensors(self) -> SensorReading:
        """Nothing: there is no device."""
        return SensorReading()


class _Loaded(SimulatedEngine):
    """A simulated engine that a backend loaded, with or without a group."""

    def __init__(
        self,
        spec: ModelSpec,
        speed: SpeedModel,
        crash: CrashPoint,
        phases_s: dict[str, float],
        release: Callable[[], None],
        weights: str,
    ) -> None:
        longest = {} if spec.max_model_len is None else {"max_model_len": spec.max_model_len}
        super().__init__(
            spec.name,
            speed=replace(speed, max_num_seqs=spec.max_num_seqs),
            adapters=[adapter.name for adapter in spec.adapters],
            crash_point=crash,
            path=spec.path,
            weights=weights,
            **longest,
        )
        self._revision = spec.revision
        self._phases_s = phases_s
        self._release = release

    @property
    def info(self) -> EngineInfo:
        """The model and the limits."""
        return replace(super().info, revision=self._revision, phases_s=dict(self._phases_s))

    def reload(self, path: str) -> None:
        """See `worker.engines.simulated.engine.SimulatedEngine.reload`."""
        _read_weights(path)
        super().reload(path)

    def close(self) -> None:
        """Drop all requests and release the group; idempotent."""
        super().close()
        self._release()


def check_weights(weights: str) -> None:
    """Raise `Unsupported` for weights in a folder named `BROKEN`."""
    if PurePath(weights).name == BROKEN:
        raise Unsupported(f"{weights}: broken weights")


def _read_weights(weights: str) -> None:
    check_weights(weights)
    if PurePath(weights).name == CORRUPT:
        raise Unsupported(f"{weights}: corrupt weights")


def _nobody() -> None:
    """Release no group."""


# A group of simulated processes: each follower keeps a connection to the leader.

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
