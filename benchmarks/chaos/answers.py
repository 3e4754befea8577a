"""The requests of a chaos run's clients, and the right answers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from benchmarks.chaos.history import Asked, Ended, now
from benchmarks.simulated import simulated_answer
from tokenyard.protocol.settings import EngineName
from tokenyard.protocol.wire import Request, SamplingParams, pack_tokens

#: With steps of 40 ms an answer takes 0.2 to 2 s, a long one 3 to 6 s.
_SIMULATED_TOKENS: Final = (5, 50)
_SIMULATED_LONG_TOKENS: Final = (75, 150)
_VOCABULARY: Final = 32_000
_TEXT_SHARE: Final = 0.2
#: The adder's context ends at 64 tokens; a sum takes seven.
_LONG_SUM_TOKENS: Final = 48
_SUM_TOKENS: Final = 6
#: Its words without the special ones, and lengths that fit its context.
_ADDER_WORDS: Final = (3, 18)
_ADDER_PROMPT: Final = 8
_ADDER_LONGEST: Final = 54


def draw_request(
    draw: random.Random,
    engine: EngineName,
    *,
    client: str,
    request_id: str,
    stream: bool,
    is_long: bool = False,
) -> Asked:
    """Make a random request with a known answer."""
    if engine == "vllm":
        text = f"{draw.randrange(10, 100)}+{draw.randrange(10, 100)}="
        # The model continues after its answer, which makes a stream long enough to break.
        runs_on = is_long or draw.random() < 0.5
        longest = _LONG_SUM_TOKENS if runs_on else _SUM_TOKENS
        return Asked(
            now(), client, request_id, longest, stream=stream, text=text, ignore_eos=runs_on
        )
    longest = draw.randint(*(_SIMULATED_LONG_TOKENS if is_long else _SIMULATED_TOKENS))
    seed = draw.randrange(2**31) if draw.random() < 0.5 else None
    if draw.random() < _TEXT_SHARE:
        text = f"Tell me about {draw.randrange(10**9)}"
        return Asked(now(), client, request_id, longest, stream=stream, text=text, seed=seed)
    tokens = [draw.randrange(_VOCABULARY) for _ in range(draw.randint(1, 16))]
    return Asked(now(), client, request_id, longest, stream=stream, tokens=tokens, seed=seed)


def draw_over_http(
    draw: random.Random,
    engine: EngineName,
    *,
    client: str,
    request_id: str,
    key: str,
    stream: bool,
    is_long: bool,
) -> Asked:
    """Make a random request for a gateway, which renders it with the adder's tokenizer."""
    if engine == "vllm":
        asked = draw_request(
            draw, engine, client=client, request_id=request_id, stream=stream, is_long=is_long
        )
        return msgspec.structs.replace(asked, key=key)
    longest = _ADDER_LONGEST if is_long else draw.randint(*_SIMULATED_TOKENS)
    tokens = [draw.randrange(*_ADDER_WORDS) for _ in range(draw.randint(1, _ADDER_PROMPT))]
    seed = draw.randrange(2**31)
    about: dict[str, Any] = {"stream": stream, "tokens": tokens, "seed": seed, "key": key}
    return Asked(now(), client, request_id, longest, **about)


def to_request(asked: Asked, reply_to: str = "") -> Request:
    """Make the request for the wire."""
    return Request(
        id=asked.id,
        client=asked.client,
        tokens=None if asked.tokens is None else pack_tokens(asked.tokens),
        prompt=asked.text,
        params=SamplingParams(
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            temperature=0.0,
            ignore_eos=asked.ignore_eos,
        ),
        stream=asked.stream,
        reply_to=reply_to,
        tenant=asked.tenant,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """The right answer: its tokens, or the start of its text (all of it if the model ends it)."""

    tokens: list[int] | None
    text: str | None
    is_whole: bool = True

    def fault_of(self, ended: Ended) -> str:
        """Describe the fault of a completed result; "" if it is right."""
        if self.tokens is not None and ended.tokens != self.tokens:
            return f"tokens {_brief(ended.tokens)} instead of {_brief(self.tokens)}"
        text = ended.text or ""
        if self.text is None or text == self.text:
            return ""
        if not self.is_whole and text.startswith(self.text):
            return ""
        return f"text {ended.text!r} instead of {self.text!r}"

    def begins_with(self, tokens: list[int]) -> bool:
        """Whether ``tokens`` may be the start of this answer."""
        return self.tokens is None or self.tokens[: len(tokens)] == tokens


def _brief(tokens: list[int]) -> str:
    return f"{tokens[:4]}… ({len(tokens)})"


class Answers:
    """The right answers of one engine."""

    def __init__(self, engine: EngineName) -> None:
        self._engine = engine

    def __call__(self, asked: Asked) -> Answer:
        """The right answer to a request."""
        if self._engine == "vllm":
            left, _, right = (asked.text or "").rstrip("=").partition("+")
            return Answer(None, str(int(left) + int(right)), is_whole=not asked.ignore_eos)
        choice = simulated_answer(to_request(asked))
        # A gateway makes the text itself, with the tokenizer of a model that is not there.
        return Answer(list(choice.tokens), None if asked.key else choice.text)
