"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def with_options(*options: Callable[[Any], Any]) -> Callable[[CommandT], CommandT]:
    """Adds them to a command; its help shows them in this order."""

    def add(command: CommandT) -> CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return add
