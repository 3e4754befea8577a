"""Options of the command line, made from settings."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import click

from tokenyard.protocol.settings import ProgramSettings


def settings_options(
    settings_type: type[ProgramSettings], texts: Mapping[str, str], prefix: str
) -> Iterator[click.Option]:
    """An option for each setting that ``texts`` explain, in their order.

    ``prefix`` begins the names of its variables.
    """
    hints = typing.get_type_hints(settings_type)
    fields = {field.name: field for field in dataclasses.fields(settings_type)}
    for field in (fields[name] for name in texts if name in fields.keys() - {"redis_url", "yard"}):
        # A default that says nothing to a reader is left to the settings themselves.
        is_plain = field.default is not dataclasses.MISSING and field.default not in {"", ()}
        yield click.Option(
            [_flag(field.name, hints[field.name])],
            type=_parameter_type(hints[field.name]),
            default=field.default if is_plain else None,
            show_default=True,
            envvar=f"{prefix}_{field.name.upper()}",
            help=texts[field.name],
        )


def _flag(name: str, hint: Any) -> str:
    flag = name.replace("_", "-")
    return f"--{flag}/--no-{flag}" if hint is bool else f"--{flag}"


def _parameter_type(hint: Any) -> Any:
    """How click reads a setting of this type."""
    if typing.get_origin(hint) is Literal:
        return click.Choice(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return words
    if hint in {int, float, str, bool}:
        return hint
    if isinstance(hint, UnionType) and Path in typing.get_args(hint):
        return click.Path(path_type=Path)
    raise TypeError(f"no option for a setting of type {hint}")


def options_of(settings: ProgramSettings, names: Iterable[str]) -> Iterator[str]:
    """These settings as options for a child, without those that are empty."""
    for name in names:
        value = getattr(settings, name)
        if value not in {None, "", ()}:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            yield f"--{name.replace('_', '-')}={text}"


def words(text: str) -> tuple[str, ...]:
    """Several words in one option: ``0,1``."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
