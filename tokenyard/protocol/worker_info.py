"""What the roster says of workers, and of the hosts that they run on."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from msgspec import Struct

from tokenyard.protocol.control import RunState

#: Life of a worker process. Only a ready one is given requests. ``attached`` lends its device to
#: another worker of its host, the leader of a group. A draining one finishes what it has.
WorkerState = Literal[
    "warming",
    "warm",
    "loading",
    "ready",
    "draining",
    "asleep",
    "unloading",
    "attached",
    "failed",
]
WORKER_STATES: tuple[WorkerState, ...] = get_args(WorkerState)


class WorkerTotals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker has published since it joined. Numbers only: `renew` takes them for no news."""

    finished: int = 0  # results
    tokens: int = 0  # of deltas and results, each once
    ttft_ms: float | None = None  # median from acceptance to first token, of the last minute


class WorkerInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the roster says of one worker.

    A worker serves one model at most: for another one it leaves and joins anew.
    """

    name: str
    state: WorkerState
    model: str = ""  # "" while it holds none
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
    controller: str = ""  # the controller that owns its process
    device: int = 0  # index of its device on the host
    adapters: list[str] = msgspec.field(default_factory=list)  # names that it serves too
    group: list[str] = msgspec.field(default_factory=list)  # names of a group, its leader first
    since_ms: int = 0  # unix time at which it came into this state
    swapped_ms: int = 0  # unix time at which its device last gave up a model for another; 0: never
    memory_bytes: int = 0  # of the device (on a CPU: of the process) when last measured
    warm_bytes: int = 0  # the same before any model: what an unload must come back to
    run_state: RunState = "RUNNING"  # what it does of what its desired state says
    epoch: int | None = None  # that it stamps on results
    profiling: bool = False
    weights: str = ""  # that it has loaded in place of the model's own
    obeyed: str = ""  # id of the newest signal that it is in accord with
    tally: WorkerTotals = WorkerTotals()  # about once a second
    last_error: str = ""  # why its process died the last time, or what its engine could not do
    last_error_ms: int = 0  # unix time of that
    lease_ms: int = 0  # length of its lease
    cache_tokens: int = 0  # that its prefix cache holds; 0: not told


class ModelInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that a host may load."""

    name: str  # that requests use
    adapters: list[str] = msgspec.field(default_factory=list)  # LoRA; requests use these names too
    ranks: int = 1  # devices that it takes: tensor times pipeline parallelism
    pin: int = 0  # workers that always hold it
    max_model_wait_s: float = 0.0  # longest wait of a request for its turn; 0: the yard decides
    load_s: float = 0.0  # what loading took when last measured; 0: not yet
    fault: str = ""  # why it could not be loaded the last time
    faulted_ms: int = 0  # when that was, unix time
    faults: int = 0  # how often in a row
    swap_s: float = 0.0  # what its coming and going took last, from files or asleep; 0: not yet


class HostInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A controller, and what it may load."""

    name: str  # of the controller
    host: str = ""
    devices: int = 1
    models: list[ModelInfo] = msgspec.field(default_factory=list)


_worker_decoder = msgspec.json.Decoder(WorkerInfo)
_host_decoder = msgspec.json.Decoder(HostInfo)


def encode_worker(worker: WorkerInfo) -> bytes:
    """A roster entry as JSON."""
    return msgspec.json.encode(worker)


def decode_worker(packed: bytes) -> WorkerInfo:
    """Inverse of `encode_worker`."""
    return _worker_decoder.decode(packed)


def encode_host(host: HostInfo) -> bytes:
    """A host as JSON."""
    return msgspec.json.encode(host)


def decode_host(packed: bytes) -> HostInfo:
    """Inverse of `encode_host`."""
    return _host_decoder.decode(packed)
