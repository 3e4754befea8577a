"""An engine without a model: tokens from a hash of the request, time from a speed model.

For tests of the control plane and for benchmarks of the broker. It never claims to be anything
else: `EngineInfo.engine` is ``simulated``, and it refuses what it could only make up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import shake_128
from typing import Any, Final

import msgspec
from msgspec import Struct

import tokenyard
from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.replies import Choice
from tokenyard.protocol.wire import (
    PLAIN_CHAT,
    Assignment,
    Request,
    SamplingParams,
    pack_tokens,
    unpack_tokens,
)
from worker.engines import (
    EngineEvent,
    EngineInfo,
    Finished,
    RequestFailed,
    TokenDelta,
    Unsupported,
)
from worker.engines.admission import (
    PromptField,
    check_params,
    check_prompt,
    check_resumable,
    prompt_field,
)
from worker.engines.crash_points import CrashPoint
from worker.engines.simulated.cache import PrefixCache

#: Prompts and answers that are kept, for those that come again, as in benchmarks: there the engine
#: stands for a device, whose work costs the processor nothing.
KEPT: Final = 1024
UNLIMITED_SLOTS: Final = 256  # what an engine without a batch limit tells the coordinator
_BYTES: Final = 256  # the vocabulary of text prompts
_PRINTABLE: Final = [chr(33 + at) for at in range(94)]


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """How long a step takes; zero means no limit.

    A step prefills what joined the batch, but for what the prefix cache has of it, and then makes
    ``tokens_per_step`` tokens for every request in it. Without a decode rate nothing is gained by
    steps, so a request that does not stream is answered in one.
    """

    prefill_tokens_per_s: float = 0.0  # of all prompts together
    decode_tokens_per_s: float = 0.0  # of each sequence, however many run
    max_num_seqs: int = 0
    tokens_per_step: int = 1
    cache_tokens: int = 0  # of the prefix cache; zero: there is none


class SimulatedEngine:
    """Answers every request with tokens that follow from the request and the weights alone.

    Token i of choice c is a word of the hash of (prompt, seed, c), and of the path of the weights
    where they are not the model's own: the same on every worker, in
    every batch and after every crash, and one pass of a hash function for a whole answer, so
    that the broker is what a benchmark sees. Text is one printable character per token.
    """

    def __init__(
        self,
        model: str = "simulated",
        *,
        speed: SpeedModel | None = None,
        vocab_size: int = 32_000,
        max_model_len: int = 8_192,
        adapters: Sequence[str] = (),
        crash_point: str | CrashPoint = "",
        path: str = "",
        weights: str = "",
    ) -> None:
        """``path`` is where the model's own weights are, ``weights`` what stands in for them.

        ``crash_point``, where it is a text, is read by `CrashPoint`: raises `ValueError`.
        """
        self._speed = speed or SpeedModel()
        if isinstance(crash_point, str):
            crash_point = CrashPoint(crash_point)
        self._crash = crash_point
        self._sleeps = False
        self._is_open = True
        self._path = path
        self._weights = weights
        self._waiting: deque[_Generation] = deque()
        self._running: dict[str, _Generation] = {}
        self._free_at_s = 0.0  # monotonic time at which the simulated device is idle
        self._cache = PrefixCache(self._speed.cache_tokens)
        self._info = EngineInfo(
            engine="simulated",
            engine_version=tokenyard.__version__,
            model=model,
            revision="",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            slots=self._speed.max_num_seqs or UNLIMITED_SLOTS,
            adapters=tuple(adapters),
            cache_tokens=self._cache.tokens,
        )

    @property
    def info(self) -> EngineInfo:
        """What it serves."""
        return replace(self._info, weights=self._weights)

    def add(self, assignment: Assignment) -> None:
        """Take a request in; see `worker.engines.Engine.add`."""
        if self._sleeps:
            raise RuntimeError("the engine sleeps; wake it first")
        check_resumable(assignment)
        generation = _start(assignment, self._info, self._salt)
        prompt = _tokenize(assignment.request)
        generation.is_poison = self._crash.is_poison(prompt)
        generation.is_faulty = self._crash.is_faulty(prompt, assignment.faults)
        self._waiting.append(generation)

    def abort(self, keys: Iterable[str]) -> None:
        """Forget requests, by lane entry; unknown ones are ignored."""
        gone = set(keys)
        for key in gone & self._running.keys():
            del self._running[key]
        if any(generation.key in gone for generation in self._waiting):
            self._waiting = deque(one for one in self._waiting if one.key not in gone)

    def take_out(self, key: str) -> Finished | None:
        """Stop a request and give what it has made; see `worker.engines.Engine.take_out`."""
        generation = self._running.get(key)
        if generation is None:
            generation = next((one for one in self._waiting if one.key == key), None)
        if generation is None:
            return None
        self.abort([key])
        return Finished(
            key,
            [_so_far(choice, generation.made) for choice in generation.choices],
            generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._running or self._waiting)

    def step(self) -> list[EngineEvent]:
        """Generate once for all running requests, taking the time that the speed model says."""
        self._crash.passed("before_step")
        self._spend(self._admit())
        if any(generation.is_poison for generation in self._running.values()):
            self._crash.passed("poison")
        events: list[EngineEvent] = []
        for generation in list(self._running.values()):
            self._advance(generation, events)
        return events

    def sleep(self, level: int) -> None:
        """Refuse work until `wake`; see `worker.engines.Engine.sleep`."""
        if level not in (1, 2):
            raise Unsupported(f"there is no sleep level {level}, only 1 and 2")
        if self.has_unfinished:
            raise RuntimeError("requests are unfinished; finish or abort them before the sleep")
        if self._sleeps:
            raise Unsupported("the engine sleeps already")
        self._sleeps = True
        self._cache.clear()
        self._crash.passed("asleep")

    def wake(self) -> None:
        """Take work again."""
        self._crash.passed("waking")
        self._sleeps = False

    def reset(self) -> None:
        """Forget the prefix cache."""
        self._cache.clear()

    def reload(self, path: str) -> None:
        """From here on tokens follow from ``path`` too; see `worker.engines.Engine.reload`."""
        if self._sleeps:
            raise Unsupported("the engine sleeps; wake it first")
        self._weights = path
        self._cache.clear()
        for generation in (*self._waiting, *self._running.values()):
            generation.change(self._info, self._salt)

    def profile(self, *, start: bool) -> None:
        """See `worker.engines.Engine.profile`."""
        verb = "start" if start else "stop"
        raise Unsupported(f"the simulated engine has no profiler to {verb}")

    def close(self) -> None:
        """Forget everything; idempotent."""
        if self._is_open:
            self._crash.passed("unloading")
        self._is_open = False
        self._waiting.clear()
        self._running.clear()

    @property
    def _salt(self) -> bytes:
        """What the weights do to the tokens: nothing, where they are the model's own."""
        return b"" if self._weights in ("", self._path) else self._weights.encode()

    def _admit(self) -> int:
        """Fill the batch; returns how many prompt tokens joined that the cache did not have."""
        joined = 0
        limit = self._speed.max_num_seqs or len(self._running) + len(self._waiting)
        while self._waiting and len(self._running) < limit:
            generation = self._waiting.popleft()
            self._running[generation.key] = generation
            self._look_up(generation)
            joined += generation.prompt_tokens - (generation.cached_tokens or 0)
        return joined

    def _look_up(self, generation: _Generation) -> None:
        """See what the prefix cache has of a prompt; from then on it has all of it."""
        if not self._cache.tokens:
            return
        request = generation.request
        prompt = _tokenize(request)
        generation.cached_tokens = self._cache.cached(request.model, prompt)
        self._cache.put(request.model, prompt)

    def _finish(self, generation: _Generation) -> Finished:
        """The answer; the prefix cache keeps it for requests that go on behind it."""
        if self._cache.tokens:
            request = generation.request
            answer = pack_tokens(generation.choices[0].tokens)
            self._cache.put(request.model, _tokenize(request) + answer)
        return Finished(
            generation.key,
            generation.choices,
            generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
        )

    def _spend(self, joined: int) -> None:
        """Sleep as long as the device would work.

        The device's clock, not the length of each sleep, is what counts: sleeps that last too
        long are made good by shorter ones.
        """
        cost_s = 0.0
        if self._speed.prefill_tokens_per_s:
            cost_s += joined / self._speed.prefill_tokens_per_s
        if self._speed.decode_tokens_per_s:
            cost_s += self._speed.tokens_per_step / self._speed.decode_tokens_per_s
        if not cost_s:
            return
        now = time.monotonic()
        if now - self._free_at_s > cost_s:
            self._free_at_s = now  # it was idle, not late
        self._free_at_s += cost_s
        if self._free_at_s > now:
            time.sleep(self._free_at_s - now)

    def _advance(self, generation: _Generation, events: list[EngineEvent]) -> None:
        at_once = not generation.streams and not self._speed.decode_tokens_per_s
        start = generation.made
        if generation.is_faulty and (start > generation.resumed_at or not generation.streams):
            del self._running[generation.key]
            events.append(RequestFailed(generation.key, Code.INFERENCE_ERROR, "told to fail"))
            return
        end = generation.longest if at_once else start + self._speed.tokens_per_step
        generation.made = end
        if end >= generation.longest:
            self._crash.passed("before_finish")
            del self._running[generation.key]
            events.append(self._finish(generation))
            return
        if generation.streams:
            self._crash.passed("mid_stream")
            events.extend(
                TokenDelta(
                    generation.key,
                    choice.index,
                    choice.tokens[max(start, seen) : end],
                    None if choice.text is None else choice.text[max(start, seen) : end],
                )
                for choice, seen in zip(generation.choices, generation.published, strict=True)
                if max(start, seen) < min(end, len(choice.tokens))
            )


class _Generation(Struct, eq=False):
    """A request in the engine: its whole answer, known from the start, and how far it is."""

    key: str
    request: Request
    prompt_tokens: int
    streams: bool
    choices: list[Choice]
    longest: int  # tokens of its longest choice
    made: int  # tokens of every choice that have been made
    resumed_at: int  # tokens that earlier attempts had made
    published: list[int]  # tokens of each choice, by earlier attempts
    is_poison: bool = False
    is_faulty: bool = False
    cached_tokens: int | None = None  # of its prompt, when it joined the batch

    def change(self, info: EngineInfo, salt: bytes) -> None:
        """Other weights: what has been made stands, the rest follows from them."""
        prompt, room = _tokenize(self.request), info.max_model_len - self.prompt_tokens
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


def _so_far(choice: Choice, made: int) -> Choice:
    text = None if choice.text is None else choice.text[:made]
    return Choice(choice.index, choice.tokens[:made], text, "abort")


def _start(assignment: Assignment, info: EngineInfo, salt: bytes) -> _Generation:
    request = assignment.request
    packed = _tokenize(request)
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
    return _Generation(
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


def _published(assignment: Assignment) -> list[list[int]]:
    """The tokens of each choice that its readers have seen; nearly always there are none."""
    count = assignment.request.params.n
    if not assignment.published:
        return [[]] * count
    return [assignment.published_of(index) for index in range(count)]


def _made_of_all(published: list[list[int]], choices: list[Choice]) -> int:
    """How many tokens every choice that goes on has already."""
    goes_on = [
        len(seen)
        for seen, choice in zip(published, choices, strict=True)
        if len(seen) < len(choice.tokens)
    ]
    return min(goes_on, default=max(map(len, published)))


@lru_cache(maxsize=KEPT)
def _checked(field: PromptField, packed: bytes, known: int, max_model_len: int) -> int:
    """How many tokens a prompt has; refuses it as `check_prompt` does."""
    prompt = unpack_tokens(packed)
    check_prompt(field, prompt, known, max_model_len)
    return len(prompt)


def _tokenize(request: Request) -> bytes:
    """Packed token ids, or the bytes of the text as such."""
    if request.tokens is not None:
        return request.tokens
    if request.prompt is not None:
        return pack_tokens(list(request.prompt.encode()))
    chat: list[Any] = [request.messages]
    if request.chat != PLAIN_CHAT:
        chat.append(request.chat)
    text = b"".join(msgspec.json.encode(each, order="deterministic") for each in chat)
    return pack_tokens(list(text))


#: Parameters that only a model can act on.
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
    """A whole choice; what was published stands, should another version have made it."""
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
    """Words of an extendable hash: a longer answer begins as a shorter one."""
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
    """The stop string that ends first in the text, and where it begins."""
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, key=lambda hit: hit[0] + len(hit[1]), default=None)
