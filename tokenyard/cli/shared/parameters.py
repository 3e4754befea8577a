"""Sampling parameters on a command line."""

from __future__ import annotations

from typing import Any

import click
import msgspec


def named_values(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """``name=value`` pairs; a value that is no JSON is text."""
    params = {}
    for pair in values:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r}: give name=value")
        try:
            params[name.replace("-", "_")] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            params[name.replace("-", "_")] = value
    return params
