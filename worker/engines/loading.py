"""Which engine a worker process gets, and the environment it must be born into."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import msgspec

from tokenyard.settings import WorkerSettings
from worker.engines import Engine
from worker.models import ModelSpec
from worker.engines.simulated import SimulatedEngine, SpeedModel
from worker.engines.vllm_environment import engine_environment, open_vllm, set_environment


def cpu_share(cores: Sequence[int], slots: int, slot: int) -> list[int]:
    """The cores of one slot; more slots than cores share them in turn."""
    if slots > len(cores):
        return [cores[slot % len(cores)]]
    return list(cores[slot * len(cores) // slots : (slot + 1) * len(cores) // slots])


def prepare_environment(settings: WorkerSettings, slot: int) -> None:
    """Choose the device of this process; must come before anything imports torch."""
    if settings.engine == "simulated":
        return
    on_cpu = not settings.devices and shutil.which("nvidia-smi") is None
    if settings.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.devices[slot]
    elif not on_cpu and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(slot)
    cores = cpu_share(sorted(os.sched_getaffinity(0)), settings.slots, slot)
    set_environment(engine_environment(cpu=on_cpu, cores=cores if on_cpu else ()))


def load_engine(settings: WorkerSettings) -> Engine:
    """Make the engine that the settings ask for; raises what it raises."""
    if settings.engine == "simulated":
        return _simulated(settings)
    return open_vllm(
        ModelSpec(
            name=settings.serves,
            path=settings.model,
            revision=settings.revision,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len or None,
            max_num_seqs=settings.max_num_seqs,
            enforce_eager=settings.enforce_eager,
            engine_args=msgspec.json.decode(settings.engine_args, type=dict),
        )
    )


def _simulated(settings: WorkerSettings) -> Engine:
    step_s = settings.simulated_step_s
    return SimulatedEngine(
        settings.serves,
        speed=SpeedModel(
            prefill_tokens_per_s=settings.simulated_prefill_rate,
            decode_tokens_per_s=1 / step_s if step_s else 0.0,
            max_num_seqs=settings.max_num_seqs,
        ),
        crash_point=settings.crash_point,
    )
