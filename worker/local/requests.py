"""A program's requests to its own engine: built by the parser of the wire, and their replies."""

from __future__ import annotations

import itertools
import queue
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from tokenyard import clock
from tokenyard.protocol.errors import EngineLost, InvalidRequest, WaitTimeout
from tokenyard.protocol.parse import read_chat_options, read_request
from tokenyard.protocol.replies import Choice, Delta, Reply, Result, to_delta, to_result
from tokenyard.protocol.sampling import why_unknown
from tokenyard.protocol.wire import (
    Assignment,
    ChatOptions,
    Request,
    SamplingParams,
    chat_fields,
    pack_tokens,
)
from worker.models import ModelSpec

#: Text, token ids, or chat messages.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_ids = itertools.count(1)
_CHAT: Final = frozenset(ChatOptions.__struct_fields__)
_ANY_MESSAGES: Final = b'[{"role":"user","content":"?"}]'
_KNOWN: Final = frozenset(SamplingParams.__struct_fields__)


def own_spec(spec: ModelSpec) -> ModelSpec:
    """Copy and validate a spec; paths become absolute, so that they hold in another process.

    Raises `InvalidRequest`.
    """
    try:
        own = msgspec.convert(msgspec.to_builtins(spec), ModelSpec)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest("model", str(error)) from error
    if not own.name:
        raise InvalidRequest("model", "give it a name")
    own = replace(
        own,
        path=_absolute(own.path),
        adapters=tuple(replace(one, path=_absolute(one.path)) for one in own.adapters),
    )
    make_requests(own, ["?"], {})  # validates its sampling parameters
    return own


def _absolute(path: str) -> str:
    found = Path(path)
    return str(found.absolute()) if found.exists() else path


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a sequence of prompts, also for a single prompt."""
    if isinstance(prompts, str):
        return [prompts]
    first = next(iter(prompts), None)
    if isinstance(first, Mapping) or hasattr(first, "__index__"):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def make_requests(
    spec: ModelSpec,
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any],
    *,
    model: str = "",
    stream: bool = False,
) -> list[Request]:
    """Build one request per prompt; the model's own parameters are the defaults.

    ``sampling`` may include chat options (`tokenyard.protocol.wire.ChatOptions`).
    Raises `InvalidRequest` with the coordinator's messages.
    """
    names = [spec.name, *(adapter.name for adapter in spec.adapters)]
    if model and model not in names:
        raise InvalidRequest("model", f"{model!r} is not served here; use {', '.join(names)}")
    chat = _chat_fields({name: sampling[name] for name in _CHAT & sampling.keys()})
    params = _params({name: value for name, value in sampling.items() if name not in _CHAT})
    shared = {b"params": params, b"model": model.encode(), b"stream": b"%d" % stream, **chat}
    any_prompt = {b"messages": _ANY_MESSAGES} if chat else {b"prompt": b"?"}
    # Reports faults that all requests share.
    read_request({**shared, **any_prompt, b"id": b"?"}, spec.sampling)
    return [_request(spec, shared, at, prompt) for at, prompt in enumerate(prompts)]


def _chat_fields(given: Mapping[str, Any]) -> dict[bytes, bytes]:
    fields = chat_fields(read_chat_options(given)) if given else {}
    return {
        name.encode(): value if isinstance(value, bytes) else b"%d" % value
        for name, value in fields.items()
    }


def _params(sampling: Mapping[str, Any]) -> bytes:
    for name in sampling:
        if name not in _KNOWN:
            raise InvalidRequest(f"params.{name}", why_unknown(name))
    try:
        return msgspec.json.encode(sampling)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("params", str(error)) from error


def _request(spec: ModelSpec, shared: Mapping[bytes, bytes], at: int, prompt: Prompt) -> Request:
    try:
        own = {b"id": b"%d" % next(_ids), **_content(prompt)}
        return read_request({**shared, **own}, spec.sampling)
    except InvalidRequest as error:
        raise InvalidRequest(f"prompts[{at}]", str(error)) from error


def _content(prompt: Prompt) -> dict[bytes, bytes]:
    if isinstance(prompt, str):
        return {b"prompt": prompt.encode()}
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
        raise InvalidRequest("prompt", "give text, token ids or chat messages")
    try:
        if len(prompt) and isinstance(prompt[0], Mapping):
            return {b"messages": msgspec.json.encode(prompt)}
        return {b"tokens": pack_tokens(cast(Sequence[int], prompt))}
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest("tokens", str(error)) from error


class RequestBatch:
    """Requests to one engine; the pool's thread adds replies, one other thread consumes them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.assignments = {f"{one.id}-0": _assignment(one) for one in requests}
        self.unanswered = dict.fromkeys(self.assignments)  # an ordered set
        self._replies: queue.SimpleQueue[tuple[str, Reply] | Exception] = queue.SimpleQueue()

    # The pool's thread

    def take(self, entry: str, reply: Reply) -> None:
        """Add a delta or the result of one of the requests."""
        self._replies.put((entry, reply))

    def fail(self, error: Exception) -> None:
        """Fail all requests."""
        self._replies.put(error)

    # The thread that asks

    def results(self, timeout_s: float) -> list[Result]:
        """Wait for all results; returns them in the order of the requests.

        Raises `EngineLost`, with the results so far, and `WaitTimeout` if nothing arrives for
        ``timeout_s``.
        """
        found: dict[str, Result] = {}
        try:
            while self.unanswered:
                entry, reply = self._next(timeout_s)
                found[entry] = to_result(reply)
        except EngineLost as error:
            error.results = [found.get(entry) for entry in self.assignments]
            raise
        return [found[entry] for entry in self.assignments]

    def stream(self, timeout_s: float) -> Iterator[Delta | Result]:
        """Yield the deltas of a single request, then its result.

        The deltas add up to the whole answer. Raises like `results`.
        """
        tokens, characters = Counter[int](), Counter[int]()  # yielded, by choice
        while self.unanswered:
            _, reply = self._next(timeout_s)
            if reply.event == "delta":
                delta = to_delta(reply)
                tokens[delta.index] += len(delta.tokens)
                characters[delta.index] += len(delta.text or "")
                yield delta
            else:
                result = to_result(reply)
                yield from _rest(result, tokens, characters)
                yield result

    def _next(self, timeout_s: float) -> tuple[str, Reply]:
        try:
            news = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            left = len(self.unanswered)
            raise WaitTimeout(
                f"no answer for {timeout_s:g} s; {left} requests were given up"
            ) from None
        if isinstance(news, Exception):
            self.unanswered.clear()
            raise news
        entry, reply = news
        if reply.event == "result":
            self.unanswered.pop(entry, None)
        return entry, reply


def _assignment(request: Request) -> Assignment:
    """Make the assignment of a request that did not queue."""
    sid = f"local/{clock.wall_ms()}-{request.id}"
    return Assignment(request=request, entry=f"{request.id}-0", sid=sid, attempt=1)


def _rest(result: Result, seen: Counter[int], characters: Counter[int]) -> Iterator[Delta]:
    """The tokens that arrived only with the result."""
    seq = seen.total()
    whole = Choice(0, result.tokens, result.text, logprobs=result.logprobs)
    for choice in result.choices or [whole]:
        at = seen[choice.index]
        tokens = choice.tokens[at:]
        text = choice.text and choice.text[characters[choice.index] :]
        if tokens or text:
            logprobs = choice.logprobs and choice.logprobs[at:]
            yield Delta(result.id, seq, tokens, text, choice.index, logprobs)
        seq += len(tokens)
