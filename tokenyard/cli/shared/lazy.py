"""Groups whose commands are imported when they are needed.

The packages `coordinator` and `worker` have common names: a module of the same name elsewhere on
the path is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

import tokenyard
from tokenyard.process.program import PlainCommand, PlainGroup
from tokenyard.protocol.errors import SettingsError

_ROOT: Final = Path(tokenyard.__file__).resolve().parents[1]


class LazyGroup(PlainGroup):
    """Imports each command when it is needed, so that all start quickly."""

    def __init__(self, *args: Any, places: Mapping[str, str], **options: Any) -> None:
        """``places`` maps each command, in order, to its ``module:attribute``."""
        super().__init__(*args, **options)
        self._places = places

    def list_commands(self, _: click.Context) -> list[str]:
        """Names, in the order of ``places``."""
        return list(self._places)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; one that refuses if its package is not ours."""
        if cmd_name not in self._places:
            return None
        module, _colon, attribute = self._places[cmd_name].partition(":")
        package = module.partition(".")[0]
        if found := _foreign_module(package):
            return _refusal(cmd_name, package, found)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def _foreign_module(package: str) -> str:
    """Where a package is found instead of ours; "" if it is ours. Imports nothing."""
    spec = importlib.util.find_spec(package)
    found = spec.origin or next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    is_ours = found and Path(found).resolve().parent == _ROOT / package
    return "" if is_ours else found or "nowhere"


def _refusal(name: str, package: str, found: str) -> click.Command:
    """A command that reports that its package is not ours."""

    def refuse(**_: object) -> None:
        ours = f"not Tokenyard's ({_ROOT / package})"
        todo = "rename it, or take its folder off PYTHONPATH"
        raise SettingsError([f"the module {package!r} is at {found}, which is {ours}: {todo}"])

    return PlainCommand(
        name,
        callback=refuse,
        params=[click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
        short_help=f"Not available: {found} is in its place.",
    )
