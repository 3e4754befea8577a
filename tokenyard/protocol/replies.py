"""Replies: the deltas and results that workers send to clients.

A `Reply` is the flat form on the wire; `Delta` and `Result` are those of the user. They grow by the
rules of `tokenyard.protocol.wire`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import Struct

from tokenyard.protocol.errors import Code, reused
from tokenyard.protocol.streams import digits
from tokenyard.protocol.wire import Refused, Request, unpack_tokens

Status = Literal["completed", "failed", "cancelled", "expired"]
TERMINAL: Final[frozenset[str]] = frozenset(get_args(Status))


class Reply(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A delta or the result of a request on the wire: a flat mapping.

    Structured values (``usage``, ``error``, ``provenance``, ``timing``, ``logprobs``,
    ``choices``) are JSON texts. The same mapping is a msgpack map in the ledger and in frames,
    and the fields of an entry of ``reply:<client>/<id>``.
    """

    id: str
    event: Literal["delta", "result"]
    seq: int  # tokens of this request that were published before this reply
    tokens: bytes  # packed: those of a delta, all of them in a result
    text: str | None = None
    index: int = 0  # of the choice that a delta belongs to, where n > 1
    logprobs: str | None = None
    status: Status | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None  # JSON: the stop string or token id
    usage: str | None = None
    error: str | None = None
    provenance: str | None = None
    timing: str | None = None
    choices: str | None = None  # JSON array of `Choice`, where n > 1
    prompt_logprobs: str | None = None
    cached_tokens: int | None = None  # `Usage.cached_tokens`, in the first delta of a stream
    created_cache_tokens: int | None = None  # the same of `Usage.created_cache_tokens`
    data: bytes | None = None  # of a task that pools: `Result.data`
    shapes: str | None = None
    errors: str | None = None
    input_tokens: str | None = None


class Usage(Struct, frozen=True, omit_defaults=True):
    """OpenAI's ``usage``: tokens in and out, over all attempts.

    ``cached_tokens`` counts the prompt tokens that the last attempt's engine had in its prefix
    cache (OpenAI's ``prompt_tokens_details.cached_tokens``), ``created_cache_tokens`` those that it
    added there; None where the engine does not report them.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class ErrorInfo(Struct, frozen=True):
    """Why a request did not complete."""

    code: str
    message: str


class Provenance(Struct, frozen=True, omit_defaults=True):
    """How a result was produced (guarantee G8)."""

    model: str
    revision: str
    engine: str
    engine_version: str
    worker: str
    attempt: int
    seed: int | None = None
    epoch: int | None = None  # of generation, when it ended; None: none was set
    first_epoch: int | None = None  # when it began, where that was another


class Timing(Struct, frozen=True, omit_defaults=True, gc=False):
    """Times in milliseconds. Engine times are those of the last attempt."""

    queue_ms: int  # accepted to assigned
    engine_ms: float | None = None  # given to the engine to finished
    first_token_ms: float | None = None  # given to the engine to first token


class Choice(Struct, frozen=True, omit_defaults=True):
    """One of ``n`` continuations of a prompt."""

    index: int
    tokens: list[int]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[str, Any]] | None = None


class Delta(Struct, frozen=True):
    """A piece of a streamed reply.

    ``seq`` counts the tokens of the request before it; ``index`` is the choice that it continues;
    ``logprobs`` has one entry for each token, where requested. The first delta of a stream may say
    how many tokens of the prompt were cached and came to be, and, where n > 1, the last delta of a
    choice how it ended; the result says this, too.
    """

    id: str
    seq: int
    tokens: list[int]
    text: str | None = None
    index: int = 0
    logprobs: list[dict[str, Any]] | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    created_cache_tokens: int | None = None


class Result(Struct, frozen=True, kw_only=True, gc=False):
    """The final answer to a request; its own fields are those of choice 0."""

    id: str
    status: Status
    tokens: list[int]
    seq: int = 0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    error: ErrorInfo | None = None
    provenance: Provenance | None = None
    timing: Timing | None = None
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[Any] | None = None
    choices: list[Choice] | None = None
    #: Of a task that pools: the numbers of all inputs, one behind the other, as little-endian
    #: float32; the shape of each input's (`[]` is one number; null: it has none, for the reason
    #: that stands in `errors` under its index).
    data: bytes | None = None
    shapes: list[list[int] | None] | None = None
    errors: dict[int, ErrorInfo] | None = None
    input_tokens: list[int] | None = None  # of each input; 0 of one that has failed

    @property
    def ok(self) -> bool:
        """Whether the request completed."""
        return self.status == "completed"

    @property
    def all_choices(self) -> list[Choice]:
        """Its choices, also the only one where n is 1."""
        ended = self.finish_reason, self.stop_reason
        return self.choices or [Choice(0, self.tokens, self.text, *ended, self.logprobs)]


_frame_decoder = msgspec.msgpack.Decoder(list[Reply])
_encode_msgpack = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode
#: Read the structured values of a `Reply`. Many have the same usage and provenance, both frozen.
_STRUCTURED: Final[Mapping[str, Callable[[str], Any]]] = {
    "stop_reason": msgspec.json.Decoder(int | str | None).decode,
    "usage": lru_cache(1024)(msgspec.json.Decoder(Usage).decode),
    "error": msgspec.json.Decoder(ErrorInfo).decode,
    "provenance": lru_cache(1024)(msgspec.json.Decoder(Provenance).decode),
    "timing": msgspec.json.Decoder(Timing).decode,
    "logprobs": msgspec.json.Decoder(list[dict[str, Any]]).decode,
    "prompt_logprobs": msgspec.json.Decoder(list[Any]).decode,
    "choices": msgspec.json.Decoder(list[Choice]).decode,
    "shapes": msgspec.json.Decoder(list[list[int] | None]).decode,
    "errors": msgspec.json.Decoder(dict[int, ErrorInfo]).decode,
    "input_tokens": msgspec.json.Decoder(list[int]).decode,
}
_BINARY: Final = frozenset({"tokens", "data"})


def encode_reply(reply: Reply) -> bytes:
    """A reply as the msgpack map that the scripts take."""
    return _encode_msgpack(reply)


#: Inverse of `encode_reply`.
decode_reply: Final = msgspec.msgpack.Decoder(Reply).decode


def decode_replies(fields: Mapping[bytes, bytes]) -> Sequence[Reply]:
    """The replies in one stream entry, whether a frame or flat."""
    frame = fields.get(b"frame")
    if frame is not None:
        return _frame_decoder.decode(frame)
    plain: dict[str, Any] = {name.decode(): value for name, value in fields.items()}
    plain = {name: one if name in _BINARY else one.decode() for name, one in plain.items()}
    return [msgspec.convert(plain, Reply, strict=False)]


def json_text(value: object) -> str:
    """A structured value of a `Reply` as JSON."""
    return _encode_json(value).decode()


def to_delta(reply: Reply) -> Delta:
    """A delta with its token ids unpacked."""
    return Delta(
        reply.id,
        reply.seq,
        unpack_tokens(reply.tokens),
        reply.text,
        reply.index,
        _STRUCTURED["logprobs"](reply.logprobs) if reply.logprobs else None,
        reply.cached_tokens,
        reply.finish_reason,
        _STRUCTURED["stop_reason"](reply.stop_reason) if reply.stop_reason else None,
        reply.created_cache_tokens,
    )


def to_result(reply: Reply) -> Result:
    """A result with everything in it decoded."""
    structured: dict[str, Any] = {
        name: decode(text) for name, decode in _STRUCTURED.items() if (text := getattr(reply, name))
    }
    return Result(
        id=reply.id,
        status=reply.status or "failed",
        tokens=unpack_tokens(reply.tokens),
        seq=reply.seq,
        text=reply.text,
        finish_reason=reply.finish_reason,
        data=reply.data,
        **structured,
    )


def data_of_inputs(result: Result) -> Iterator[tuple[list[int] | None, bytes]]:
    """The shape and the part of `Result.data` of each input; of one that has failed neither."""
    data, start = result.data or b"", 0
    for shape in result.shapes or ():
        size = 0 if shape is None else _FLOAT_BYTES * math.prod(shape)
        yield shape, data[start : start + size]
        start += size


def split_result(result: Result, count: int) -> list[Result]:
    """A result for each of the ``count`` inputs of one request."""
    shapes, tokens = result.shapes or [], result.input_tokens or []
    if not result.ok or not len(shapes) == len(tokens) == count:
        return [msgspec.structs.replace(result, id=f"{result.id}#{at}") for at in range(count)]
    found: list[Result] = []
    errors = result.errors or {}
    for at, ((shape, data), used) in enumerate(zip(data_of_inputs(result), tokens, strict=True)):
        error = errors.get(at)
        found.append(
            Result(
                id=f"{result.id}#{at}",
                status="failed" if error else "completed",
                tokens=[],
                usage=Usage(used, 0, used),
                error=error,
                provenance=result.provenance,
                timing=result.timing,
                data=data,
                shapes=[shape],
                input_tokens=[used],
            )
        )
    return found


#: Bytes of a float32.
_FLOAT_BYTES: Final = 4


def encode_cached(reply: Reply) -> str:
    """What the first delta of a stream says of the prefix cache, as the ledger keeps it."""
    created = reply.created_cache_tokens
    return f"{reply.cached_tokens} {'' if created is None else created}"


def decode_cached(kept: bytes | None) -> tuple[int | None, int | None]:
    """The tokens of the prompt that were cached, and that came to be; None where unknown.

    A ledger may be hostile.
    """
    cached, _, created = (kept or b"").partition(b" ")
    return digits(cached), digits(created)


def refusal(
    request: Request | Refused, code: Code, message: str, *, published: bytes = b""
) -> Reply:
    """The result of a request that ends without an engine; its status follows from the code."""
    return Reply(
        id=request.id,
        event="result",
        seq=len(published) // 4,
        tokens=published,
        status=status_of(code),
        error=json_text(ErrorInfo(code, message)),
    )


def refusal_of_reuse(request_id: str) -> Reply:
    """What the reply stream of another request with that id says: no result, and no tokens."""
    error = ErrorInfo(Code.ID_REUSED, reused(request_id).removeprefix(f"{Code.ID_REUSED}: "))
    return Reply(id=request_id, event="delta", seq=0, tokens=b"", error=json_text(error))


def code_of(reply: Reply) -> str:
    """The code of a reply's error; "" where it has none."""
    error: ErrorInfo | None = _STRUCTURED["error"](reply.error) if reply.error else None
    return error.code if error else ""


def status_of(code: Code) -> Status:
    """The status of a request that did not complete for this reason."""
    if code is Code.CANCELLED:
        return "cancelled"
    return "expired" if code is Code.DEADLINE_EXCEEDED else "failed"
