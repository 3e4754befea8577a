"""How a request goes on behind the tokens that its readers have already seen.

Two ways, both with vLLM's public API only:

- **behind**: the published tokens are appended to the prompt. One prefill, and exact where the
  next token depends on the tokens before it alone: greedy decoding, and sampling without a seed
  (any continuation is as good as the lost one). Text and stop strings that span the seam are
  handled here, by `TextStream`.
- **again**: the request runs from its start and its first tokens are compared with the published
  ones instead of being shown. For whatever has a history that a prompt does not carry: a seed's
  random numbers, a grammar's state, counted penalties, bad words.

Where the second run differs from the first (rounding differs with the batch), it goes on behind,
which then is inexact: penalties forget what was published, a seed starts new random numbers. A
constraint on the text cannot be taken up in the middle: such a request fails instead.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tokenyard.protocol.wire import SamplingParams

_RESET: Final = "Invalid prefix encountered"  # tokenizers, on text that is no UTF-8 by itself


class Way(enum.Enum):
    """How a generation begins."""

    FRESH = enum.auto()
    BEHIND = enum.auto()
    AGAIN = enum.auto()


def choose_way(params: SamplingParams, *, published: bool, can_show_text: bool) -> Way:
    """How to begin; ``can_show_text`` says that `TextStream` is able to, or not needed."""
    if not published:
        return Way.FRESH
    if has_history(params) or _is_seeded(params) or not can_show_text:
        return Way.AGAIN
    return Way.BEHIND


def has_history(params: SamplingParams) -> bool:
    """Whether the next token depends on more than the tokens before it.

    The repetition penalty does not count: it looks at the prompt as well.
    """
    return bool(
        params.structured_outputs
        or params.bad_words
        or params.repetition_detection
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids
        # Not the next token, but what is told of the published ones.
        or params.logprob_token_ids
        or params.prompt_logprob_token_ids  # a row for each token of the prompt, and no more
        or params.presence_penalty
        or params.frequency_penalty
    )


def _is_seeded(params: SamplingParams) -> bool:
    return params.seed is not None and params.temperature > 0


def derive_seed(*parts: object) -> int:
    """A seed that follows from the parts alone, so that every attempt has the same."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # positive, with room for n children


class TextStream:
    """Text of output tokens, piece by piece, exactly as vLLM detokenizes a stream.

    It is primed with the prompt as vLLM's own detokenizer is, so that after the same tokens both
    have shown the same characters, those held back for stop strings included.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self.text = ""
        self._shown = 0
        self._count = 0
        self._tokenizer = tokenizer
        self._params = params
        self._stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        self._skip_special = params.skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=self._skip_special)
        hold = self._stops and not params.include_stop_str_in_output
        self._held_back = max(map(len, self._stops)) - 1 if hold else 0

    def push(self, token: int) -> str | None:
        """Take one token in; returns the stop string that it completes, and cuts the text there."""
        self._count += 1
        piece = self._decode(token)
        self.text += piece
        if not piece or not self._stops or self._count <= self._params.min_tokens:
            return None
        return self._cut_at_stop(len(piece))

    def show(self, *, finished: bool = False) -> str:
        """What may be shown and was not yet."""
        end = len(self.text) - (0 if finished else self._held_back)
        start, self._shown = self._shown, max(self._shown, end)
        return self.text[start:end] if end > start else ""

    def _decode(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # tokenizers raises bare exceptions
            if not str(error).startswith(_RESET):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._tokenizer, token) or ""

    def _cut_at_stop(self, new: int) -> str | None:
        """The stop string that ends first in the newest characters."""
        hits = [
            (at + len(stop), stop)
            for stop in self._stops
            if (at := self.text.find(stop, max(0, len(self.text) - new - len(stop) + 1))) >= 0
        ]
        if not hits:
            return None
        end, stop = min(hits, key=lambda hit: hit[0])
        included = self._params.include_stop_str_in_output
        self.text = self.text[: end if included else end - len(stop)]
        return stop
