"""Tokenizing and detokenizing at the client, with the model's own tokenizer.

Chats are left to the worker, since vLLM has its own reading of a model's chat template.

transformers is imported when a tokenizer is loaded, never before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.texts import pip_install

#: Last tokens of the prompt that are decoded with a reply: whether its first word starts with a
#: space depends on them (vLLM uses the same number).
PROMPT_TAIL: Final = 5
#: Decoders write this for bytes that do not form a character yet.
_UNFINISHED: Final = "\ufffd"


@runtime_checkable
class Tokenizer(Protocol):
    """What a client needs of a tokenizer."""

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Token ids of each text, with the special tokens that the model expects."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""


class HuggingFaceTokenizer:
    """A tokenizer of the library transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """See `Tokenizer`."""
        ids: Sequence[Sequence[int]] = self._tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Tokenizer`."""
        text: str = self._tokenizer.decode(
            list(tokens),
            skip_special_tokens=skip_special_tokens,
            # Cleaning depends on the neighbours of a piece, so that pieces would not add up.
            clean_up_tokenization_spaces=False,
        )
        return text


def load_tokenizer(source: object) -> Tokenizer:
    """A tokenizer from a folder, a Hugging Face name, or a tokenizer object.

    Raises `SettingsError` where transformers is missing or cannot load it.
    """
    if hasattr(source, "apply_chat_template"):
        return HuggingFaceTokenizer(source)
    if isinstance(source, Tokenizer):
        return source
    try:
        from transformers import AutoTokenizer
    except ImportError as fault:
        raise SettingsError(
            [f"tokenizer: needs transformers: {pip_install('tokenizers')}"]
        ) from fault
    try:
        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(str(source)))
    except (OSError, ValueError) as fault:
        raise SettingsError([f"tokenizer {str(source)!r} cannot be loaded: {fault}"]) from fault


@dataclass(frozen=True, slots=True)
class LocalText:
    """How the client makes the text of one reply."""

    tokenizer: Tokenizer
    prompt_tail: tuple[int, ...] = ()
    skip_special_tokens: bool = True

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)

    def whole(self, tokens: Sequence[int]) -> str:
        """Text of a whole reply."""
        before = self.decode(self.prompt_tail)
        if before.endswith(_UNFINISHED):
            return self.decode(tokens)
        return self.decode([*self.prompt_tail, *tokens])[len(before) :]


@functools.cache
def local_text_of(folder: str) -> LocalText | None:
    """How to make text with the tokenizer in a folder; None where that cannot be loaded here."""
    with contextlib.suppress(SettingsError):
        return LocalText(load_tokenizer(folder)) if folder and Path(folder).is_dir() else None
    return None


class Detokenizer:
    """Text of a reply, piece by piece; the pieces add up to `LocalText.whole`.

    The method is that of vLLM and text-generation-inference: decode a window of recent tokens
    with and without the new ones; the difference is the new text, once it ends on a character.
    """

    def __init__(self, local: LocalText) -> None:
        self._local = local
        tail = local.prompt_tail
        self._window = [] if local.decode(tail).endswith(_UNFINISHED) else list(tail)
        self._read = len(self._window)  # tokens of the window whose text was returned

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is complete with these tokens; the rest comes with later ones."""
        self._window += tokens
        before = self._local.decode(self._window[: self._read])
        after = self._local.decode(self._window)
        if len(after) <= len(before) or after.endswith(_UNFINISHED):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]
