"""What the roster says of a worker."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

WorkerState = Literal["starting", "ready", "draining"]


class WorkerInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the roster says of one worker."""

    name: str
    state: WorkerState
    model: str
    revision: str = ""
    engine: str = "vllm"
    engine_version: str = ""
    host: str = ""
    pid: int = 0
    slots: int = 1  # requests that the engine runs at once
    lane_limit: int = 1  # most entries on its lane: slots and a small look-ahead
    max_model_len: int = 0  # tokens, prompt and output together
    vocab_size: int = 0
    tokenizer: str = ""  # where a client on the same host finds it
    started_ms: int = 0  # unix time
    phases_s: dict[str, float] = msgspec.field(default_factory=dict)  # time by phase of start


_worker_decoder = msgspec.json.Decoder(WorkerInfo)


def encode_worker(worker: WorkerInfo) -> bytes:
    """A roster entry as JSON."""
    return msgspec.json.encode(worker)


def decode_worker(packed: bytes) -> WorkerInfo:
    """Inverse of `encode_worker`."""
    return _worker_decoder.decode(packed)
