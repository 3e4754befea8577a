"""Prompts made from the columns of a table: ``Summarize: {text}``."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from functools import lru_cache


@lru_cache(maxsize=16)
def _parts(template: str) -> Sequence[tuple[str, str | None, str | None, str | None]]:
    """Its texts, each with what follows in braces; every row of a table asks again."""
    return list(string.Formatter().parse(template))


def columns_of(template: str, *, may_be_none: bool = False) -> list[str]:
    """The names in the braces of a template; raises ValueError."""
    parts = _parts(template)
    names = [name for _, name, _, _ in parts if name is not None]
    if not all(names) or any(form or conversion for _, _, form, conversion in parts):
        raise ValueError("write a column as {name}, and a brace as {{ or }}")
    if not (names or may_be_none):
        raise ValueError("names no column: write one as {name}")
    return names


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """A template of `columns_of` with the values of its columns."""
    return "".join(
        text + ("" if name is None else values[name]) for text, name, _, _ in _parts(template)
    )
