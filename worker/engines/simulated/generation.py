"""The answers of the simulated engine, which depend on the request and the weights alone."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from functools import lru_cache
from hashlib import shake_128
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.replies import Choice, ErrorInfo
from tokenyard.protocol.wire import (
    GENERATE,
    PLAIN_CHAT,
    Assignment,
    Request,
    SamplingParams,
    Task,
    pack_tokens,
    prompt_field,
    unpack_tokens,
)
from worker.engines import EngineInfo, PoolingOutput, TokenDelta
from worker.engines.admission import check_params, check_prompt, check_task

#: Number of cached prompts and answers. Benchmarks repeat them, and there the engine simulates a
#: device, which must cost the CPU nothing.
KEPT: Final = 1024
_BYTES: Final = 256  # the vocabulary of text prompts
_PRINTABLE: Final = [chr(33 + at) for at in range(94)]


class Generation(Struct, eq=False):
    """A request in the engine: its whole answer, computed at the start, and its progress."""

    key: str
    request: Request
    prompt_tokens: int
    streams: bool
    choices: list[Choice]
    published: list[int]  # number of published tokens by choice
    longest: int = 0  # tokens of the longest choice
    made: int = 0  # tokens per choice made so far
    resumed_at: int = 0  # tokens per choice made by earlier attempts
    is_poison: bool = False
    is_faulty: bool = False
    cached_tokens: int | None = None  # of the prompt, when the request joined the batch
    pooling: PoolingOutput | None = None  # of a task that pools; then it makes no tokens

    def change(self, info: EngineInfo, salt: bytes) -> None:
        """Keep the tokens made so far, and compute the rest with other weights."""
        prompt, room = tokenize(self.request), info.max_model_len - self.prompt_tokens
        self.choices = [
            choice
            if self.made >= len(choice.tokens)
            else _choice(
                self.request,
                choice.index,
                salt + prompt,
                choice.tokens[: self.made],
                room,
                info.vocab_size,
            )
            for choice in self.choices
        ]
        self.longest = max(len(choice.tokens) for choice in self.choices)


def new_deltas(generation: Generation, start: int, end: int) -> Iterator[TokenDelta]:
    """The unpublished tokens of each choice from ``start`` to ``end``."""
    cached = generation.cached_tokens if start == generation.resumed_at else None
    for choice, seen in zip(generation.choices, generation.published, strict=True):
        first, count = max(start, seen), len(choice.tokens)
        if first >= min(end, count):
            continue
        is_over = end >= count
        yield TokenDelta(
            generation.key,
            choice.index,
            choice.tokens[first:end],
            None if choice.text is None else choice.text[first:end],
            cached_tokens=cached,
            finish_reason=choice.finish_reason if is_over else None,
            stop_reason=choice.stop_reason if is_over else None,
        )
        cached = None


def cache_salt(request: Request) -> str:
    """What separates prefix caches: the adapter, the tenant, and the request's own salt."""
    return f"{request.model}\0{request.prefix_salt}"


def choice_so_far(choice: Choice, made: int) -> Choice:
    """A choice that is aborted after ``made`` tokens."""
    text = None if choice.text is None else choice.text[:made]
    return Choice(choice.index, choice.tokens[:made], text, "abort")


def start_generation(assignment: Assignment, info: EngineInfo, salt: bytes) -> Generation:
    """Compute the answer; raises `InvalidRequest`. ``salt`` depends on the weights."""
    request = assignment.request
    check_task(request.task, info.model, info.tasks)
    if request.pools:
        return _start_pooling(assignment, info, salt)
    packed = tokenize(request)
    field = prompt_field(request)
    known = info.vocab_size if field == "tokens" else _BYTES
    prompt_tokens = _checked(field, packed, known, info.max_model_len)
    _check_simulated(request, info.vocab_size)
    room = info.max_model_len - prompt_tokens
    published = _published(assignment)
    choices = [
        _choice(request, index, salt + packed, seen, room, info.vocab_size)
        for index, seen in enumerate(published)
    ]
    made = _made_of_all(published, choices) if assignment.published else 0
    return Generation(
        key=assignment.entry,
        request=request,
        prompt_tokens=prompt_tokens,
        streams=request.stream,
        choices=choices,
        longest=max([len(choice.tokens) for choice in choices]),
        made=made,
        resumed_at=made,
        published=list(map(len, published)),
    )


#: The numbers of an input, by task.
_NUMBERS: Final[dict[Task, int]] = {"embed": 8, "classify": 2}
SIMULATED_TASKS: Final[tuple[Task, ...]] = (GENERATE, *_NUMBERS)


def _start_pooling(assignment: Assignment, info: EngineInfo, salt: bytes) -> Generation:
    """Numbers from a hash of each input: words of 32 bits, from 0 to 1."""
    request = assignment.request
    count = _NUMBERS[request.task]
    shapes: list[list[int] | None] = []
    data, errors, used = b"", dict[int, ErrorInfo](), list[int]()
    for index, one in enumerate(request.inputs or [""]):
        own = replace(
            request,
            inputs=None,
            prompt=one if isinstance(one, str) else None,
            tokens=None if isinstance(one, str) else pack_tokens(itertools.chain(*_halves(one))),
        )
        try:
            packed = tokenize(own if request.inputs else request)
            known = _BYTES if isinstance(one, str) and request.tokens is None else info.vocab_size
            field = prompt_field(request)
            name = f"inputs[{index}]" if request.inputs else field
            tokens = _checked(name, packed, known, info.max_model_len)
        except InvalidRequest as error:
            if not request.inputs:
                raise
            errors[index] = ErrorInfo(Code.INVALID_REQUEST, str(error))
            shapes.append(None)
            used.append(0)
            continue
        words = shake_128(salt + packed + request.task.encode()).digest(4 * count)
        data += array("f", [word / 2**32 for word in memoryview(words).cast("I")]).tobytes()
        shapes.append([count])
        used.append(tokens)
    return Generation(
        key=assignment.entry,
        request=request,
        prompt_tokens=sum(used),
        streams=False,
        choices=[Choice(0, [])],
        published=[0],
        pooling=PoolingOutput(data, shapes, errors, used),
    )


def _halves(one: list[Any]) -> list[list[int]]:
    return one if isinstance(one[0], list) else [one]


def _published(assignment: Assignment) -> list[list[int]]:
    """The published tokens of each choice; nearly always none."""
    count = assignment.request.params.n
    if not assignment.published:
        return [[]] * count
    return [assignment.published_of(index) for index in range(count)]


def _made_of_all(published: list[list[int]], choices: list[Choice]) -> int:
    """The smallest number of published tokens of an incomplete choice."""
    goes_on = [
        len(seen)
        for seen, choice in zip(published, choices, strict=True)
        if len(seen) < len(choice.tokens)
    ]
    return min(goes_on, default=max(map(len, published)))


@lru_cache(maxsize=KEPT)
def _checked(field: str, packed: bytes, known: int, max_model_len: int) -> int:
    """The number of tokens of a prompt; raises like `check_prompt`."""
    prompt = unpack_tokens(packed)
    check_prompt(field, prompt, known, max_model_len)
    return len(prompt)


def tokenize(request: Request) -> bytes:
    """The prompt as packed token ids; the tokens of a text are its bytes."""
    if request.tokens is not None:
        return request.tokens
    if request.prompt is not None:
        return pack_tokens(list(request.prompt.encode()))
    if request.inputs is not None:
        return pack_tokens(list(msgspec.json.encode(request.inputs)))
    chat: list[Any] = [request.messages]
    if request.chat != PLAIN_CHAT:
        chat.append(request.chat)
    text = b"".join(msgspec.json.encode(each, order="deterministic") for each in chat)
    return pack_tokens(list(text))


#: Parameters that need a model.
_REAL: Final = (
    *("logprobs", "prompt_logprobs", "structured_outputs"),
    *("logprob_token_ids", "prompt_logprob_token_ids", "thinking_token_budget"),
    *("trace_decode_token_ids", "repetition_detection"),
)


def _check_simulated(request: Request, vocab_size: int) -> None:
    params = request.params
    check_params(params, vocab_size)
    for name in _REAL:
        if getattr(params, name) is not None:
            raise InvalidRequest(f"params.{name}", "the simulated engine has none to give")
    if params.stop and not request.wants_text:
        raise InvalidRequest("params.stop", "stop strings need text; ask with detokenize")


def _choice(
    request: Request,
    index: int,
    prompt: bytes,
    published: list[int],
    room: int,
    vocab_size: int,
) -> Choice:
    """A whole choice; keeps published tokens, even if another version made them."""
    params = request.params
    count = room if params.max_tokens is None else min(params.max_tokens, room)
    tokens = [*published, *_hashed(prompt, params.seed, index, count, vocab_size)[len(published) :]]
    tokens, reason, stop = _cut_at_token(tokens, params)
    if not request.wants_text:
        return Choice(index, tokens, None, reason, stop)
    text = "".join([_PRINTABLE[token % 94] for token in tokens])
    found = _first_stop(text, params)
    if found is None:
        return Choice(index, tokens, text, reason, stop)
    at, word = found
    end = at + len(word)
    shown = text[: end if params.include_stop_str_in_output else at]
    return Choice(index, tokens[:end], shown, "stop", word)


@lru_cache(maxsize=KEPT)
def _hashed(prompt: bytes, seed: int | None, index: int, count: int, vocab_size: int) -> list[int]:
    """Words of an extendable hash: a shorter answer is a prefix of a longer one."""
    words = shake_128(prompt + b"%d/%d" % (seed or 0, index)).digest(4 * count)
    return [word % vocab_size for word in unpack_tokens(words)]


def _cut_at_token(tokens: list[int], params: SamplingParams) -> tuple[list[int], str, int | None]:
    if not params.stop_token_ids:
        return tokens, "length", None
    for at, token in enumerate(tokens):
        if token in params.stop_token_ids:
            return tokens[: at + 1], "stop", token
    return tokens, "length", None


def _first_stop(text: str, params: SamplingParams) -> tuple[int, str] | None:
    """Position and text of the stop string that ends first in the text."""
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, key=lambda hit: hit[0] + len(hit[1]), default=None)
