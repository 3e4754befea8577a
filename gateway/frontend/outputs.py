"""Replies of the queue as vLLM's `RequestOutput`.

Of a stream, each token becomes one output, whatever pieces the worker published: what vLLM's front
end writes then depends on the tokens alone, and a second gateway writes the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

from tokenyard.protocol.replies import Choice, Delta, Reply, Result, to_delta, to_result

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreRequest

#: A character of UTF-8 has at most four bytes.
_CONTEXT: Final = 4

Position = dict[int, Logprob]
#: Tokens of the prompt that the prefix cache had, and that are new there.
Cached = tuple[int | None, int | None]


class OutputStream:
    """Makes the outputs of one streamed request."""

    def __init__(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        tokenizer: TokenizerLike | None,
        prompt: str | None,
        lora: LoRARequest | None,
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._lora = lora
        self._choices = [_Choice(index, request, params, tokenizer) for index in range(params.n)]
        self._seen = 0  # tokens of all choices
        self._cached: Cached = None, None
        self._prompt_logprobs: list[Position | None] | None = None
        self._is_first = True

    def read(self, reply: Reply) -> Iterator[RequestOutput]:
        """The outputs that a reply adds; one that was read before adds none."""
        if reply.event == "delta":
            yield from self._read_delta(reply)
        else:
            yield from self._read_result(to_result(reply))

    def _read_delta(self, reply: Reply) -> Iterator[RequestOutput]:
        delta = to_delta(reply)
        behind = self._seen - delta.seq  # tokens that are known
        # Behind a hole (reply streams are bounded) the result has everything.
        if not 0 <= behind < len(delta.tokens):
            return
        if not delta.seq:
            self._cached = delta.cached_tokens, delta.created_cache_tokens
        choice = self._choices[delta.index]
        tokens, logprobs = delta.tokens[behind:], (delta.logprobs or [])[behind:]
        self._seen += len(tokens)
        is_over = delta.finish_reason is not None
        middle = tokens[:-1] if is_over else tokens
        for at, token in enumerate(middle):
            yield self._output(choice.next(token, logprobs[at : at + 1]))
        if is_over:
            yield self._output(choice.end(tokens[-1:], logprobs[-1:], delta))

    def _read_result(self, result: Result) -> Iterator[RequestOutput]:
        self._cached = _cached(result) if self._cached == (None, None) else self._cached
        self._prompt_logprobs = _prompt_positions(result)
        ends = [end for end in result.all_choices if not self._choices[end.index].is_over]
        left = len(ends)
        for end in ends:
            choice = self._choices[end.index]
            tail = end.tokens[choice.count :]
            logprobs = (end.logprobs or [])[choice.count :]
            for at, token in enumerate(tail[:-1]):
                yield self._output(choice.next(token, logprobs[at : at + 1]))
            left -= 1
            last = choice.end(tail[-1:], logprobs[-1:] if tail else [], end)
            yield self._output(last, is_last=not left)

    def _output(self, choice: CompletionOutput, *, is_last: bool = False) -> RequestOutput:
        choice.lora_request = self._lora
        is_first, self._is_first = self._is_first, False
        output = RequestOutput(
            request_id=self._request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs if is_first else None,
            outputs=[choice],
            finished=is_last,
            lora_request=self._lora,
        )
        return _tell(output, self._cached) if is_last or is_first else output


class _Choice:
    """One continuation of the prompt, as far as it is known."""

    def __init__(
        self,
        index: int,
        request: EngineCoreRequest,
        params: SamplingParams,
        tokenizer: TokenizerLike | None,
    ) -> None:
        self.count = 0
        self.is_over = False
        self._index = index
        self._text = IncrementalDetokenizer.from_new_request(
            tokenizer if params.detokenize else None, request
        )
        self._texts = TokenTexts(tokenizer if params.detokenize else None)
        self._sum = 0.0
        self._is_cut = False  # a stop string ended the text

    def next(self, token: int, logprobs: Sequence[Any]) -> CompletionOutput:
        """The output of one more token."""
        self.count += 1
        self._read([token])
        return self._piece([token], logprobs, finished=False)

    def _read(self, tokens: Sequence[int], *, ends_text: bool = False) -> None:
        """Add tokens to the text; those that a step made behind a stop string add nothing."""
        if not self._is_cut:
            self._is_cut = self._text.update(list(tokens), ends_text) is not None

    def end(
        self, tokens: Sequence[int], logprobs: Sequence[Any], end: Choice | Delta
    ) -> CompletionOutput:
        """The output of the last token, with the reason for the end."""
        self.count += len(tokens)
        self.is_over = True
        # As in vLLM: a token that ends the text is not part of it, unless the request says so.
        ends_text = end.finish_reason == "stop" and not isinstance(end.stop_reason, str)
        self._read(tokens, ends_text=ends_text)
        piece = self._piece(tokens, logprobs, finished=True)
        piece.finish_reason, piece.stop_reason = end.finish_reason, end.stop_reason
        return piece

    def _piece(
        self, tokens: Sequence[int], logprobs: Sequence[Any], *, finished: bool
    ) -> CompletionOutput:
        positions = [position_of(self._texts.complete(entry)) for entry in logprobs] or None
        self._sum += sum(entry["logprob"] or 0.0 for entry in logprobs)
        return CompletionOutput(
            index=self._index,
            text=self._text.get_next_output_text(finished, delta=True),
            token_ids=list(tokens),
            cumulative_logprob=self._sum if positions else None,
            logprobs=positions,
        )


def whole_output(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int] | None,
    result: Result,
    lora: LoRARequest | None,
) -> RequestOutput:
    """The only output of a request that is not streamed."""
    outputs = []
    for choice in result.all_choices:
        positions = [position_of(entry) for entry in choice.logprobs or ()]
        total = sum(entry["logprob"] or 0.0 for entry in choice.logprobs or ())
        outputs.append(
            CompletionOutput(
                index=choice.index,
                text=choice.text or "",
                token_ids=choice.tokens,
                cumulative_logprob=total if choice.logprobs is not None else None,
                logprobs=positions if choice.logprobs is not None else None,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                lora_request=lora,
            )
        )
    output = RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=_prompt_positions(result),
        outputs=outputs,
        finished=True,
        lora_request=lora,
    )
    return _tell(output, _cached(result))


def position_of(entry: Mapping[str, Any]) -> Position:
    """One position of logprobs in vLLM's form, the sampled token first."""
    position = {entry["token"]: _logprob(entry)}
    for one in entry["top"]:
        position.setdefault(one["token"], _logprob(one))
    return position


def _logprob(entry: Mapping[str, Any]) -> Logprob:
    value = entry["logprob"]
    return Logprob(0.0 if value is None else value, entry["rank"], entry["decoded"])


def _prompt_positions(result: Result) -> list[Position | None] | None:
    if result.prompt_logprobs is None:
        return None
    return [None if entry is None else position_of(entry) for entry in result.prompt_logprobs]


def _cached(result: Result) -> Cached:
    usage = result.usage
    return (usage.cached_tokens, usage.created_cache_tokens) if usage else (None, None)


def _tell(output: RequestOutput, cached: Cached) -> RequestOutput:
    """An output that says what was cached; older versions take no argument for the second."""
    output.num_cached_tokens, output.num_cache_creation_tokens = cached
    return output


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
