"""A program's own engines: how the tests start them and look at them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from worker import EngineHandle, ModelSpec, WorkerController

ROOT = Path(__file__).parents[2]
SIM = ModelSpec("sim", "nowhere")
PAIR = ModelSpec("pair", "nowhere", tensor_parallel_size=2)
LONG = 8_000  # tokens: never finished, with steps of some milliseconds
START_S = 60.0


Start = Callable[..., WorkerController]


def states(controller: WorkerController) -> list[tuple[str, str]]:
    return [(one.state, one.model) for one in controller.status()]


def pid_of(controller: WorkerController, engine: EngineHandle) -> int:
    ready = {one.device: one.pid for one in controller.status() if one.state == "ready"}
    return ready[engine.devices[0]]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
