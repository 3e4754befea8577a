"""Folders and files that the commands know of without being told."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

import tokenyard

_EXAMPLE_MODELS: Final = Path("examples/arithmetic/models")


def example_model(name: str) -> Path:
    """Folder of one of the models that come with a checkout.

    Raises `click.UsageError` where there is no checkout.
    """
    checkout = Path(tokenyard.__file__).resolve().parents[1]
    for root in (checkout, Path.cwd()):
        folder = root / _EXAMPLE_MODELS / name
        if (folder / "config.json").is_file():
            return folder
    raise click.UsageError(
        f"the example model {name!r} comes with a checkout of Tokenyard and is not here: give"
        " --model PATH, a model folder or a Hugging Face name (or --engine simulated, which needs"
        " no model and makes its answers up)"
    )
