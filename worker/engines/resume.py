"""How a request continues after the tokens that its readers have already seen.

There are two ways, both with vLLM's public API only:

- **behind**: the published tokens are appended to the prompt. This takes one prefill, and is exact
  if the next token depends only on the tokens before it: in greedy decoding, and in sampling
  without a seed (any continuation is as good as the lost one). `TextStream` handles text and stop
  strings that span the seam.
- **again**: the request runs from its start, and its first tokens are compared with the published
  ones instead of being shown. This is for requests with a history outside the prompt: random
  numbers of a seed, state of a grammar, counted penalties, bad words.

If the second run differs from the first (rounding depends on the batch), the request continues
behind the published tokens, which then is inexact: penalties ignore the published tokens, and a
seed starts new random numbers. A constraint on the text cannot resume in the middle: such a request
fails instead.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tokenyard.protocol.wire import SamplingParams

_RESET: Final = "Invalid prefix encountered"  # from tokenizers, on bytes that are not UTF-8


class Way(enum.Enum):
    """How the generation of a request begins."""

    FRESH = enum.auto()
    BEHIND = enum.auto()
    AGAIN = enum.auto()


def choose_way(params: SamplingParams, *, published: bool, can_show_text: bool) -> Way:
    """Choose how to begin; ``can_show_text``: `TextStream` works or is not needed."""
    if not published:
        return Way.FRESH
    is_seeded = params.seed is not None and params.temperature > 0
    if has_history(params) or is_seeded or not can_show_text:
        return Way.AGAIN
    return Way.BEHIND


def has_history(params: SamplingParams) -> bool:
    """Whether the next token depends on more than the tokens before it.

    The repetition penalty does not count: it includes the prompt.
    """
    return bool(
        params.structured_outputs
        or params.bad_words
        or params.repetition_detection
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids
        # These two affect not the next token, but the logprobs of earlier ones.
        or params.logprob_token_ids
        or params.prompt_logprob_token_ids  # exactly one row per token of the prompt
        or params.presence_penalty
        or params.frequency_penalty
    )


def derive_seed(*parts: object) -> int:
    """A seed that depends on the parts alone, so that it is the same in every attempt."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # positive, with room for n children


class TextStream:
    """Text of output tokens, piece by piece, exactly as vLLM detokenizes a stream.

    It starts with the prompt, like vLLM's detokenizer. After the same tokens both have shown the
    same characters, and hold the same ones back for stop strings.
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
        """Add a token; cut the text at the stop string that it completes, and return that."""
        self._count += 1
        piece = self._decode(token)
        self.text += piece
        if not piece or not self._stops or self._count <= self._params.min_tokens:
            return None
        return self._cut_at_stop(len(piece))

    def show(self, *, finished: bool = False) -> str:
        """The text that may be shown and was not shown yet."""
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
        """Cut at the stop string that ends first in the ``new`` newest characters; returns it."""
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
