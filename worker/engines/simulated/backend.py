"""A worker process that only pretends to hold models: for tests of the pool and of the yard."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import Final

from worker.engines import Engine, EngineInfo, Group, Memory, Unsupported
from worker.engines.crash_points import CrashPoint
from worker.engines.simulated.engine import SimulatedEngine
from worker.engines.simulated.group import attend, gather
from worker.engines.simulated.speed import SpeedModel
from worker.engines.stopwatch import Stopwatch
from worker.models import ModelSpec

#: A model with this path cannot be loaded, nor can weights in a folder of this name.
BROKEN: Final = "broken"
#: Nor can weights in a folder of this name, which look well until somebody tries.
CORRUPT: Final = "corrupt"
#: A model whose path ends so keeps some memory when it goes: 16 MiB, or 1 GiB.
LEAKY: Final = "leaky"
CLINGING: Final = "clinging"
_KEPT: Final = {LEAKY: 16 * 1024**2, CLINGING: 1024**3}
_MEMORY: Final = Memory(host=64 * 1024**2)


class SimulatedBackend:
    """See `worker.engines.Backend`. Every model can be loaded, but for one whose path is `BROKEN`.

    Loading takes ``load_s`` seconds; all else takes none, and a model takes no memory, unless it
    leaks.
    """

    def __init__(
        self, *, speed: SpeedModel | None = None, load_s: float = 0.0, crash_point: str = ""
    ) -> None:
        """The batch of ``speed`` is that of each model. Raises what `CrashPoint` raises."""
        self._speed = speed or SpeedModel()
        self._load_s = load_s
        self._crash = CrashPoint(crash_point)  # it counts over all models
        self._kept: list[bytearray] = []

    def warm_up(self) -> dict[str, float]:
        """There is nothing to do; seconds by phase."""
        self._crash.passed("warming")
        self._crash.passed("illegal")
        self._crash.passed("stall")
        return {"import": 0.0}

    def load(self, spec: ModelSpec, group: Group | None = None, weights: str = "") -> Engine:
        """Pretend to load a model; a group is waited for."""
        stopwatch = Stopwatch()
        with stopwatch.phase("weights"):
            self._crash.passed("loading")
            time.sleep(self._load_s)
            if spec.path == BROKEN:
                raise RuntimeError("broken model")
            _read_weights(weights)
        self._kept.append(bytearray(_KEPT.get(PurePath(spec.path).name, 0)))
        release = _nobody
        if group is not None:
            with stopwatch.phase("group"):
                release = gather(group)
        return _Loaded(spec, self._speed, self._crash, stopwatch.phases_s, release, weights)

    def attend(self, group: Group) -> None:
        """Wait until the leader lets go; raises `ConnectionError` where it dies instead."""
        attend(group, lambda: self._crash.passed("attached"))

    def memory(self) -> Memory:
        """Always the same, but for what has leaked."""
        return Memory(host=_MEMORY.host + sum(map(len, self._kept)))


class _Loaded(SimulatedEngine):
    """A simulated engine that was loaded, perhaps as the leader of a group."""

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
        """What it serves."""
        return replace(super().info, revision=self._revision, phases_s=dict(self._phases_s))

    def reload(self, path: str) -> None:
        """See `worker.engines.simulated.engine.SimulatedEngine.reload`."""
        _read_weights(path)
        super().reload(path)

    def close(self) -> None:
        """Forget everything, and let go of the group; idempotent."""
        super().close()
        self._release()


def check_weights(weights: str) -> None:
    """Raises `Unsupported` for weights that cannot be loaded."""
    if PurePath(weights).name == BROKEN:
        raise Unsupported(f"{weights}: broken weights")


def _read_weights(weights: str) -> None:
    check_weights(weights)
    if PurePath(weights).name == CORRUPT:
        raise Unsupported(f"{weights}: corrupt weights")


def _nobody() -> None:
    """There is no group to let go of."""
