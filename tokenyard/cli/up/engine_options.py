"""The model and the devices of the engines of a local yard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

import tokenyard
from tokenyard.process.settings_options import settings_options
from tokenyard.protocol.settings import WorkerSettings

#: Workers by default, on a CPU or with enough GPUs.
DEFAULT_WORKERS: Final = 2
DEVICE_TEXTS: Final = {
    "device": "What engines use; `auto` asks vLLM and torch.",
    "devices": "GPUs by index or UUID, one for each worker.  [default: the first]",
}
_PACKAGE: Final = Path(tokenyard.__file__).resolve().parent
#: Of a checkout, and of a wheel.
_EXAMPLE_MODELS: Final = (_PACKAGE.parent / "examples/arithmetic/models", _PACKAGE / "models")


def worker_options(
    slots: str, texts: Mapping[str, str], slots_variable: str | None = None
) -> list[click.Parameter]:
    """``--slots``, and options with the variables of settings of workers.

    ``slots`` and ``texts`` are their help.
    """
    count = click.Option(
        ["--slots", "--workers", "slots"],
        envvar=slots_variable,
        type=click.IntRange(1, 64),
        show_default=f"{DEFAULT_WORKERS}, or as many as there are GPUs, if fewer",
        help=slots,
    )
    return [count, *settings_options(WorkerSettings, texts, "TOKENYARD_WORKER")]


def worker_settings(slots: int | None, **given: Any) -> tuple[WorkerSettings, str]:
    """The settings of the controller, and the devices of its workers in words ("" for none).

    What is None in ``given`` has its default. Raises `tokenyard.protocol.errors.SettingsError` if
    there are not enough devices.
    """
    values = {name: value for name, value in given.items() if value is not None}
    wanted = slots or len(values.get("devices", ()))
    settings = WorkerSettings(redis_url="", slots=wanted or 1, **values)
    if settings.engine == "simulated":
        return dataclasses.replace(settings, slots=wanted or DEFAULT_WORKERS), ""
    # Late, so that `--help` works without the worker's dependencies.
    from worker.engines.devices import check_slots, find_device

    found = find_device(settings)
    settings = dataclasses.replace(settings, slots=wanted or found.default_slots(DEFAULT_WORKERS))
    check_slots(settings, found)
    return settings, str(found)


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
