"""Prompts and answers for those who may see them, cut to what a page can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenyard.protocol.replies import Result
from tokenyard.protocol.texts import counted
from tokenyard.protocol.wire import Request, unpack_tokens

#: Most characters of one text on a page.
MOST_CHARACTERS: Final = 20_000
#: Most token ids of one list on a page.
MOST_IDS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Content:
    """A text, or token ids where there is none."""

    text: str
    is_ids: bool = False
    cut: str = ""  # what is missing, in words; empty: nothing


def content_of(text: str | None, tokens: Sequence[int]) -> Content:
    """The text, or the ids, with the length of what is left out."""
    if text is not None:
        missing = len(text) - MOST_CHARACTERS
        cut = f"{missing:,} of {len(text):,} characters are left out" if missing > 0 else ""
        return Content(text[:MOST_CHARACTERS], cut=cut)
    missing = len(tokens) - MOST_IDS
    cut = f"{missing:,} of {len(tokens):,} token ids are left out" if missing > 0 else ""
    return Content(" ".join(map(str, tokens[:MOST_IDS])), is_ids=True, cut=cut)


def prompt_of(request: Request) -> Content:
    """The prompt of a request."""
    if request.tokens is not None:
        return content_of(None, unpack_tokens(request.tokens))
    if request.prompt is not None:
        return content_of(request.prompt, ())
    return content_of(msgspec.json.format(msgspec.json.encode(request.messages)).decode(), ())


def length_of(request: Request) -> str:
    """The length of a prompt in words."""
    if request.tokens is not None:
        return counted(len(request.tokens) // 4, "token")
    if request.prompt is not None:
        return counted(len(request.prompt), "character")
    size = len(msgspec.json.encode(request.messages))
    return f"{counted(len(request.messages or ()), 'message')}, {size:,} bytes of JSON"


def answers_of(result: Result) -> list[Content]:
    """The answers of a result, one for each choice."""
    if result.choices:
        return [content_of(one.text, one.tokens) for one in result.choices]
    if not result.tokens and not result.text:
        return []
    return [content_of(result.text, result.tokens)]
