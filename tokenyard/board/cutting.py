"""Long texts, cut for a page."""

from __future__ import annotations


def cut(text: str, most: int) -> str:
    """The beginning of a text, with its length where something is left out."""
    if len(text) <= most:
        return text
    return f"{text[:most]} … ({len(text):,} characters)"
