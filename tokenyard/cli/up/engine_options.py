"""The model and the devices of the engines of a local yard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import click

import tokenyard
from tokenyard.cli.shared.options import CommandT, with_options
from tokenyard.process.settings_options import words
from tokenyard.protocol.settings import DeviceName, EngineName, WorkerSettings

#: Workers by default, on a CPU or with enough GPUs.
DEFAULT_WORKERS: Final = 2
SLOTS_DEFAULT: Final = f"{DEFAULT_WORKERS}, or as many as there are GPUs, if fewer"
_DEFAULTS: Final = {
    field.name: field.default
    for field in dataclasses.fields(WorkerSettings)
    if isinstance(field.default, int | float | str) and field.default != ""
}
_PACKAGE: Final = Path(tokenyard.__file__).resolve().parent
#: Of a checkout, and of a wheel.
_EXAMPLE_MODELS: Final = (_PACKAGE.parent / "examples/arithmetic/models", _PACKAGE / "models")


def worker_option(name: str, text: str, kind: Any = str) -> Callable[[CommandT], CommandT]:
    """An option with the variable of a setting of workers, and its default if it says anything."""
    default = _DEFAULTS.get(name)
    return click.option(
        f"--{name.replace('_', '-')}",
        type=kind,
        default=default,
        show_default=default is not None,
        envvar=f"TOKENYARD_WORKER_{name.upper()}",
        help=text,
    )


#: With the variables of a worker.
device_options: Final = with_options(
    worker_option(
        "device",
        "What engines use; `auto` asks vLLM and torch.",
        click.Choice(get_args(DeviceName)),
    ),
    click.option(
        "--devices",
        type=words,
        default="",
        envvar="TOKENYARD_WORKER_DEVICES",
        help="GPUs by index or UUID, one for each worker.  [default: the first]",
    ),
)


def count_workers(
    engine: EngineName, device: DeviceName, devices: tuple[str, ...], workers: int | None
) -> tuple[int, str]:
    """The number of workers, and their devices in words ("" for none).

    Raises `tokenyard.protocol.errors.SettingsError` if there are not enough devices.
    """
    if engine == "simulated":
        return workers or len(devices) or DEFAULT_WORKERS, ""
    # Late, so that `--help` works without the worker's dependencies.
    from worker.engines.devices import check_slots, find_device

    slots = workers or len(devices) or 1
    settings = WorkerSettings(redis_url="", device=device, devices=devices, slots=slots)
    found = find_device(settings)
    slots = workers or len(devices) or found.default_slots(DEFAULT_WORKERS)
    check_slots(dataclasses.replace(settings, slots=slots), found)
    return slots, str(found)


def example_model(name: str) -> Path:
    """The folder of an example model; raises `click.UsageError` where it is not installed."""
    for root in _EXAMPLE_MODELS:
        folder = root / name
        if (folder / "config.json").is_file():
            return folder
    raise click.UsageError(
        f"the example model {name!r} is not installed here: `tokenyard up --model PATH` takes"
        " another one, a model folder or a Hugging Face name (and `tokenyard up --engine"
        " simulated` needs none, and invents its answers)"
    )
