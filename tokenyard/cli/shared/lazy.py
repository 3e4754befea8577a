"""Groups of commands that are imported when they are asked for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Final

import click

from tokenyard.cli.shared.own_packages import refusal, stranger
from tokenyard.process.program import PlainGroup

#: Set by the shell while it completes a line.
COMPLETION: Final = "_TOKENYARD_COMPLETE"


class LazyGroup(PlainGroup):
    """Imports a command when it is needed, so that each starts quickly."""

    def __init__(self, *args: Any, places: Mapping[str, str], **options: Any) -> None:
        """``places`` says where each command lies, as ``module:attribute``, in their order."""
        super().__init__(*args, **options)
        self._places = places

    def list_commands(self, _: click.Context) -> list[str]:
        """Names, in the order in which a newcomer needs them."""
        return list(self._places)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        """The command itself."""
        if cmd_name not in self._places:
            return None
        module, _colon, attribute = self._places[cmd_name].partition(":")
        package = module.partition(".")[0]
        if found := stranger(package):
            return refusal(cmd_name, package, found)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if COMPLETION in os.environ:
            from tokenyard.cli.shared.completing import teach

            teach(command)
        return command
