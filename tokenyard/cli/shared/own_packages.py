"""Packages beside `tokenyard`, `coordinator` and `worker`, whose names others may use, too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

import click

import tokenyard
from tokenyard.process.program import PlainCommand
from tokenyard.protocol.errors import SettingsError

_HOME: Final = Path(tokenyard.__file__).resolve().parents[1]


def stranger(package: str) -> str:
    """What is found in the place of a package of ours; "" where it is ours. Imports nothing."""
    spec = importlib.util.find_spec(package)
    found = spec.origin or next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    is_ours = found and Path(found).resolve().parent == _HOME / package
    return "" if is_ours else found or "nowhere"


def refusal(name: str, package: str, found: str) -> click.Command:
    """Stands for a command whose package is not ours: it says so."""

    def refuse(**_: object) -> None:
        ours = f"not Tokenyard's ({_HOME / package})"
        todo = "rename it, or take its folder off PYTHONPATH"
        raise SettingsError([f"the module {package!r} is at {found}, which is {ours}: {todo}"])

    return PlainCommand(
        name,
        callback=refuse,
        params=[click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
        short_help=f"Not to be had: {found} is in its place.",
    )
