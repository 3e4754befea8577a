"""What engines of a yard on this machine use, and how many workers that is room for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, get_args

import click

from tokenyard.process.program import words
from tokenyard.protocol.settings import DeviceName, EngineName, WorkerSettings

#: Workers where nobody has said how many, on a CPU or with GPUs enough.
DEFAULT_WORKERS: Final = 2
SLOTS_DEFAULT: Final = f"{DEFAULT_WORKERS}, or as many as there are GPUs, if fewer"


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device`` and ``--devices``, which are also variables as of a worker."""
    for option in (
        click.option(
            "--devices",
            type=words,
            default="",
            envvar="TOKENYARD_WORKER_DEVICES",
            help="GPUs by index or UUID, one for each worker.  [default: the first]",
        ),
        click.option(
            "--device",
            type=click.Choice(get_args(DeviceName)),
            default="auto",
            show_default=True,
            envvar="TOKENYARD_WORKER_DEVICE",
            help="What engines use; `auto` asks vLLM and torch.",
        ),
    ):
        command = option(command)
    return command


def count_workers(
    engine: EngineName, device: DeviceName, devices: tuple[str, ...], workers: int | None
) -> tuple[int, str]:
    """How many workers there are to be, and what their engines use, in words ("" for none).

    Raises `tokenyard.protocol.errors.SettingsError` where the device cannot be had, or not so many.
    """
    if engine == "simulated":
        return workers or len(devices) or DEFAULT_WORKERS, ""
    # Late: a client that has no worker installed can still read `--help`.
    from worker.engines.devices import check_slots, find_device

    slots = workers or len(devices) or 1
    settings = WorkerSettings(redis_url="", device=device, devices=devices, slots=slots)
    found = find_device(settings)
    slots = workers or len(devices) or found.default_slots(DEFAULT_WORKERS)
    check_slots(dataclasses.replace(settings, slots=slots), found)
    return slots, str(found)
