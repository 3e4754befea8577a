"""vLLM's protocol between a front end and its engine, the engine's side, in one place.

Without vLLM, torch and numpy. Source: ``vllm/v1/engine/__init__.py``, ``core.py`` and ``utils.py``
of the versions in `KNOWN`. Structs are msgpack arrays that grow at their ends: a reader ignores
what is new, and a writer cuts off what is not needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import Awaitable, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
import zmq
import zmq.asyncio
from msgspec import Struct
from zmq.utils.monitor import recv_monitor_message

from tokenyard import clock
from tokenyard.broker.tasks import first_of
from tokenyard.protocol.wire import GENERATE

#: The versions of vLLM whose front ends have been tried.
KNOWN: Final = ("0.31.", "0.32.", "0.33.")
#: From here on a front end is told why a request has failed.
_TELLS_ERRORS: Final = (0, 33)

#: What a front end is told of a failed request: its reason ("told"); nothing, and it answers 500
#: ("bare"); or, of a task that pools, that it had a miss in its cache of media, which it answers
#: with 503 ("missed"): 0.32 ends with any other failure of such a request, 0.31 with each.
FailureForm = Literal["told", "bare", "missed"]

ADD: Final = b"\x00"
ABORT: Final = b"\x01"
UTILITY: Final = b"\x03"

FINISH_REASONS: Final = {"stop": 0, "length": 1, "abort": 2, "error": 3, "repetition": 4}
#: What `output_kind` of sampling parameters says of an answer that nobody sees before its end.
FINAL_ONLY: Final = 2
#: Of an engine's two bytes of identity; there is one.
_RANK: Final = 0
_IDENTITY: Final = _RANK.to_bytes(2, "little")
_ABOUT: Final = {"local": False, "headless": True}
#: Steps that a front end may leave unread: one that reads nothing more is given up.
_MOST_UNREAD: Final = 100_000
#: Messages that are taken together, before what they ask for begins.
_MOST_AT_ONCE: Final = 1_000
_LINGER_MS: Final = 4_000
_REFUSED: Final = zmq.EVENT_CONNECT_RETRIED  # nobody listens
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
_DEAD: Final = b"ENGINE_CORE_DEAD"
#: msgpack extension of raw bytes.
_RAW: Final = 3
#: The logprob of what has none.
_NO_LOGPROB: Final = -9999.0

T = TypeVar("T")
#: One position: the sampled token, then the likeliest, each (token, logprob, rank).
Row = Sequence[tuple[int, float, int]]


class EnginePoolingParams(Struct, array_like=True, gc=False):
    """The `PoolingParams` of a request."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: int = FINAL_ONLY
    late_chunking_params: Any = None  # from 0.33 on


class EngineCoreRequest(Struct, array_like=True, gc=False):
    """A request, as far as an engine without a device needs it."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: dict[str, Any] | None
    pooling_params: EnginePoolingParams | None
    arrival_time: float
    lora_request: list[Any] | None = None  # its first is the name
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None


decode_request: Final = msgspec.msgpack.Decoder(EngineCoreRequest).decode
decode_ids: Final = msgspec.msgpack.Decoder(list[str]).decode
#: (client, number of the call, method, arguments)
decode_call: Final = msgspec.msgpack.Decoder(tuple[int, int, str, Any]).decode
_decode: Final = msgspec.msgpack.Decoder().decode
_encode: Final = msgspec.msgpack.Encoder().encode


def failure_form(version: str, task: str) -> FailureForm:
    """How front ends of this version are told that a request for this task has failed."""
    if tuple(map(int, version.split(".")[:2])) >= _TELLS_ERRORS:
        return "told"
    return "bare" if task == GENERATE else "missed"


def ready(max_model_len: int, adapters: int, version: str) -> bytes:
    """What makes a front end know an engine: the first message on its input socket."""
    return _encode(
        {
            "max_model_len": max_model_len,
            "num_gpu_blocks": 1,
            "block_size": 16,
            "dp_stats_address": None,
            "dtype": "bfloat16",
            "vllm_version": version,
            "world_size": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": _RANK,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "instance_id": f"tokenyard-bridge-{os.getpid()}",
            "supports_lora": adapters > 0,
            "max_loras": adapters,
        }
    )


# What an engine answers.


def output(
    request_id: str,
    tokens: list[int],
    *,
    rows: Sequence[Row] | None = None,
    prompt_rows: Sequence[Row] | None = None,
    finish: int | None = None,
    stop: int | str | None = None,
    prefill: tuple[int, int] | None = None,
    pooled: tuple[Sequence[int], bytes] | None = None,
) -> list[Any]:
    """An EngineCoreOutput; the first has ``prefill``: tokens of the prompt, and those cached.

    ``pooled`` is the shape and the numbers (float32) of a request that pools.
    """
    if finish is None and rows is None and prefill is None:
        return [request_id, tokens]
    stats = None
    if prefill is not None:
        total, cached = prefill
        stats = {
            "num_prompt_tokens": total,
            "num_computed_tokens": total - cached,
            "num_cached_tokens": cached,
            "num_local_cached_tokens": cached,
        }
    return [
        *(request_id, tokens, _logprobs(rows), _logprobs_tensors(prompt_rows)),
        pooled and ("float32", pooled[0], msgspec.msgpack.Ext(_RAW, pooled[1])),
        *(finish, stop, None, None, None, None, stats),
    ]


def failed(
    request_id: str,
    message: str,
    *,
    form: FailureForm,
    is_invalid: bool = False,
    retryable: bool = False,
) -> list[Any]:
    """The end by an error."""
    last: list[Any] = [request_id, [], None, None, None, FINISH_REASONS["error"]]
    if form == "missed":
        last += [None] * 7 + [0, [""]]
    elif form == "told":
        code = "validation_error" if is_invalid else "generation_error"
        error = {"code": code, "message": message, "retryable": retryable}
        last += [None] * 7 + [0] + [None] * 4 + [error]
    return last


def _array(code: str, shape: Sequence[int], values: Sequence[float]) -> tuple[str, Any, Any]:
    kinds = {"i": "<i4", "f": "<f4"}
    packed = struct.pack(f"<{len(values)}{code}", *values)
    return kinds[code], shape, msgspec.msgpack.Ext(_RAW, packed)


def _logprobs(rows: Sequence[Row] | None) -> tuple[Any, ...] | None:
    """LogprobsLists; all rows get the same width."""
    if not rows:
        return None
    width = max(map(len, rows))
    even = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
    shape = (len(even), width)
    return (
        _array("i", shape, [token for row in even for token, _, _ in row]),
        _array("f", shape, [logprob for row in even for _, logprob, _ in row]),
        _array("i", (len(even),), [row[0][2] for row in even]),
        None,
    )


def _logprobs_tensors(rows: Sequence[Row] | None) -> tuple[Any, ...] | None:
    """LogprobsTensors, of a prompt: the same under torch's names of types."""
    names = {"<i4": "int32", "<f4": "float32"}
    arrays = _logprobs(rows)
    return arrays and tuple(one and (names[one[0]], *one[1:]) for one in arrays)


def rows_of(entries: Sequence[dict[str, Any]] | None) -> list[Row] | None:
    """The logprobs of a reply as rows."""
    if not entries:
        return None
    return [[_ranked(one) for one in (entry, *entry["top"])] for entry in entries]


def _ranked(one: dict[str, Any]) -> tuple[int, float, int]:
    logprob = one["logprob"]
    return one["token"], _NO_LOGPROB if logprob is None else logprob, one["rank"] or 0


# Sockets


class Addresses(Struct, frozen=True):
    """The sockets of a front end, a pair for each of its processes."""

    inputs: list[str]
    outputs: list[str]
    #: Whether it is vLLM's in Python, whose socket takes no second engine: it would drop unseen
    #: what it is asked.
    is_python: bool = False


class FrontGone(Exception):
    """The front end has closed its sockets."""


class Watched:
    """A socket to a front end that tells when its peer has come and gone."""

    def __init__(self, address: str) -> None:
        self.socket: Any = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.identity, self.socket.linger = _IDENTITY, _LINGER_MS
        self.socket.rcvhwm = 0
        self._monitor: Any = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(address)

    async def until(self, *events: int) -> int:
        """Wait for one of these events; which it is."""
        while True:
            event: int = (await recv_monitor_message(self._monitor))["event"]
            if event in events:
                return event

    async def receive(self, message: Awaitable[T]) -> T:
        """What a read brings; raises `FrontGone` where the peer goes first."""
        reading = asyncio.ensure_future(message)
        if reading not in await first_of(reading, self.until(zmq.EVENT_DISCONNECTED)):
            self.socket.linger = 0  # the next front end there is not told what this one was
            raise FrontGone
        return reading.result()

    def close(self) -> None:
        """Close it; what was sent still leaves."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()


async def meet(address: str) -> Addresses:
    """Introduce this engine to the front end at ``address``; waits for one to be there.

    Raises `FrontGone` where it ends meanwhile.
    """
    with contextlib.closing(Watched(address)) as door:
        await door.socket.send(_encode({"status": "HELLO", **_ABOUT}))
        init = _decode(await door.receive(door.socket.recv()))
        await door.socket.send(_encode({"status": "READY", **_ABOUT}))
        told = init["addresses"]
        return Addresses(told["inputs"], told["outputs"])


class Channel:
    """The engine's sockets to one process of a front end."""

    def __init__(self, input_address: str, output_address: str) -> None:
        self._input = Watched(input_address)
        # Not asyncio's: a PUSH with room sends at once, and the message of a step is small.
        context: Any = zmq.Context.shadow(zmq.asyncio.Context.instance().underlying)
        self._output = context.socket(zmq.PUSH)
        self._output.sndhwm, self._output.linger = _MOST_UNREAD, _LINGER_MS
        self._output.connect(output_address)
        self._is_stuck = asyncio.Event()

    async def register(self, ready_message: bytes, within_s: float) -> None:
        """Say that the engine is there; raises `FrontGone` where no front end is."""
        try:
            event = await asyncio.wait_for(
                self._input.until(zmq.EVENT_HANDSHAKE_SUCCEEDED, _REFUSED), within_s
            )
        except TimeoutError:
            raise FrontGone from None
        if event == _REFUSED:
            raise FrontGone
        await self._input.socket.send(ready_message)

    async def receive(self) -> list[tuple[bytes, list[bytes]]]:
        """The next messages, at least one: type and frames of each.

        All that are there, since a front end waits for ever for what a killed bridge has not taken.
        """
        found = [await self._input.socket.recv_multipart()]
        with contextlib.suppress(zmq.Again):
            while len(found) < _MOST_AT_ONCE:
                found.append(await self._input.socket.recv_multipart(zmq.NOBLOCK))
        return [(kind, frames) for kind, *frames in found]

    async def until_gone(self) -> None:
        """Wait until the front end has closed the socket, or has left too much unread."""
        await first_of(self._input.until(zmq.EVENT_DISCONNECTED), self._is_stuck.wait())

    def send(self, outputs: Sequence[Any], finished: Sequence[str] | None = None) -> None:
        """Send what a step has made, which is never nothing: vllm-rs would die of it."""
        self._send([_RANK, outputs, None, clock.monotonic(), None, finished])

    def answer(self, call: int, result: object = None, failure: str | None = None) -> None:
        """Answer a call; a result is its type, or None, and its value."""
        told = [call, failure, None if failure else (None, result)]
        self._send([_RANK, [], None, clock.monotonic(), told])

    def _send(self, message: Sequence[Any]) -> None:
        try:
            self._output.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._is_stuck.set()

    def die(self) -> None:
        """Say that the engine is dead: vLLM's front end fails what waits, and ends.

        vllm-rs would take no other engine after it.
        """
        with contextlib.suppress(zmq.Again):
            self._output.send(_DEAD, zmq.NOBLOCK)

    def close(self) -> None:
        """Leave without a word."""
        self._output.close()
        self._input.close()
