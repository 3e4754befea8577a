"""The texts of single tokens in logprobs, where a character is spread over several tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.engine.logprobs import LogprobsProcessor

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

#: A character of UTF-8 has at most four bytes.
_CONTEXT: Final = 4


class TokenTexts:
    """The text of each token of one answer, by vLLM's rule.

    The token that completes a character has the character as its text, those before it have none.
    vLLM looks for them among the tokens of its own run; a worker that continues the stream of
    another does not know those before, so the text is completed here.
    """

    def __init__(self, tokenizer: TokenizerLike | None) -> None:
        self._rule = LogprobsProcessor(
            tokenizer=tokenizer,
            logprobs=None,
            prompt_logprobs=None,
            cumulative_logprob=None,
            num_logprobs=None,
            num_prompt_logprobs=None,
        )
        self._before: deque[int] = deque(maxlen=_CONTEXT)

    def complete(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """The logprobs of the next token, with the texts that its worker could not know."""
        context = list(self._before)
        self._before.append(entry["token"])
        if not context or self._rule.tokenizer is None:
            return entry
        top = [self._with_text(one, context) for one in entry["top"]]
        return {**self._with_text(entry, context), "top": top}

    def _with_text(self, one: Mapping[str, Any], context: list[int]) -> Mapping[str, Any]:
        if one["decoded"]:
            return one
        text = self._rule._correct_decoded_token(one["token"], context)  # noqa: SLF001 - vLLM's rule
        return {**one, "decoded": text}
