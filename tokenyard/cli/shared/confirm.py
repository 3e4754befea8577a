"""Asking before something is ended that cannot be brought back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def yes_option(command: CommandT) -> CommandT:
    """Adds ``--yes`` to a command."""
    return click.option("--yes", "is_sure", is_flag=True, help="Do not ask first.")(command)


def ask_first(question: str, *, is_sure: bool) -> None:
    """Ask, unless the operator is sure; "no" ends the command with status 1.

    Raises `click.UsageError` where nobody is there to answer, so that a script says what it means.
    """
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is no terminal to ask on: give --yes")
    click.confirm(question, abort=True, err=True)
