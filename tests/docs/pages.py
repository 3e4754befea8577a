"""Reading the documents: sections, tables and code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"`([^`\n]+)`")
_TERM = re.compile(r"^- ((?:`[^`\n]+`[ ,]*)+):", re.MULTILINE)
_FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    """The text of a document."""
    return (ROOT / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next of its level or a higher one."""
    level = len(heading) - len(heading.lstrip("#"))
    start = text.index(f"\n{heading}\n") + len(heading) + 2
    following = re.search(rf"^#{{1,{level}}} ", text[start:], re.MULTILINE)
    return text[start : start + following.start()] if following else text[start:]


def rows(text: str) -> Iterator[list[str]]:
    """The rows of all tables in a text, cell by cell, without heads."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        is_head = at + 1 < len(lines) and lines[at + 1].startswith("|---")
        if line.startswith("|") and not line.startswith("|---") and not is_head:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def first_names(text: str) -> set[str]:
    """Everything set as code in the first cells of the tables in a text, and before the colons of
    its lists."""
    told = [row[0] for row in rows(text)] + _TERM.findall(text)
    return {name for names in told for name in _NAME.findall(names)}


def names(text: str) -> set[str]:
    """Everything set as code in a text."""
    return set(_NAME.findall(_FENCE.sub("", text)))


def code(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [found["text"] for found in _FENCE.finditer(text) if found["language"] == language]
