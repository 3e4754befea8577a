"""The roster's entries of workers and hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from tokenyard.protocol.control import RunState
from tokenyard.protocol.streams import readable

#: The states of a worker process. Only a ready worker gets requests. An attached one lends its
#: device to the leader of a group on its host. A draining one finishes its running requests.
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
    """A worker's counts since it joined. Numbers only: `renew` announces no change of them."""

    finished: int = 0  # results
    failed: int = 0  # of these, not completed
    tokens: int = 0  # made, each once; also of answers that are published whole
    ttft_ms: float | None = None  # median from acceptance to first token, of the last minute
    #: The same times since it joined, counted by bucket of `telemetry.metrics.BUCKETS_S`.
    ttft: list[int] = msgspec.field(default_factory=list)
    temperature_c: int | None = None  # of its device; None: the driver does not say
    power_w: int | None = None  # that its device draws


class WorkerInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The roster's entry of one worker.

    A worker serves one model at most: for another one it leaves and joins again.
    """

    name: str
    state: WorkerState
    model: str = ""  # "" while it holds none
    revision: str = ""
    engine: str = "vllm"
    engine_version: str = ""
    host: str = ""
    pid: int = 0
    max_num_seqs: int = 1  # requests that the engine runs at once
    lane_limit: int = 1  # most entries on its lane: those and a small look-ahead
    max_model_len: int = 0  # tokens, prompt and output together
    vocab_size: int = 0
    tokenizer: str = ""  # its path, for clients on the same host
    started_ms: int = 0  # unix time
    phases_s: dict[str, float] = msgspec.field(default_factory=dict)  # time by phase of start
    controller: str = ""  # the controller that owns its process
    device: int = 0  # index of its device on the host
    adapters: list[str] = msgspec.field(default_factory=list)  # names that it also serves
    group: list[str] = msgspec.field(default_factory=list)  # names of a group, its leader first
    since_ms: int = 0  # unix time at which it entered this state
    swapped_ms: int = 0  # unix time at which its device last changed its model; 0: never
    memory_bytes: int = 0  # of the device (on a CPU: of the process) when last measured
    warm_bytes: int = 0  # the same before any model: the target of an unload
    run_state: RunState = "RUNNING"  # the observed one
    epoch: int | None = None  # that it stamps on results
    weights: str = ""  # that it has loaded instead of the model's own
    obeyed: str = ""  # id of the newest signal that it has carried out
    tally: WorkerTotals = WorkerTotals()  # about once a second
    last_error: str = ""  # why its process last died, or what its engine could not do
    last_error_ms: int = 0  # unix time of that
    lease_ms: int = 0  # length of its lease
    cache_tokens: int = 0  # capacity of its prefix cache; 0: unknown
    core_pid: int = 0  # of the process that has the device; 0: its own
    tasks: list[str] = msgspec.field(default_factory=list)  # that its model does


class OutputDefaults(Struct, frozen=True, omit_defaults=True):
    """Of ``ServingInfo.sampling``, what decides how much a request may generate."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None


class ServingInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a gateway needs to render a model's requests and answers, from the models file."""

    path: str  # a folder on the host, or a name that vLLM can resolve
    revision: str = ""
    max_model_len: int | None = None  # tokens; None: the model's own
    trust_remote_code: bool = False
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)  # defaults for its requests
    serve_args: dict[str, Any] = msgspec.field(default_factory=dict)  # arguments of `vllm serve`


class ModelInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that a host may load."""

    name: str  # that requests use
    adapters: list[str] = msgspec.field(default_factory=list)  # LoRA; requests use these names too
    ranks: int = 1  # devices that it needs: tensor times pipeline parallelism
    pin: int = 0  # workers that always hold it
    max_model_wait_s: float = 0.0  # longest wait of a request for the model; 0: the yard decides
    load_s: float = 0.0  # last measured time of a load; 0: none yet
    fault: str = ""  # why the last load failed
    faulted_ms: int = 0  # unix time of that
    faults: int = 0  # how often in a row
    swap_s: float = 0.0  # last measured time of a swap, from files or asleep; 0: none yet
    serving: ServingInfo | None = None


class HostInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A controller, and the models that it may load."""

    name: str  # of the controller
    host: str = ""
    devices: int = 1
    models: list[ModelInfo] = msgspec.field(default_factory=list)
    left_ms: int = 0  # unix time at which it stopped; 0: it runs, or nobody knows


def split_hosts(
    hosts: Sequence[HostInfo], named: Collection[str]
) -> tuple[list[HostInfo], list[HostInfo]]:
    """The hosts that are there, ``named`` by workers with a lease; and those that are gone.

    Of the latter only what nobody else announces, each model once, as by the last to stop: they may
    have been scaled to zero.
    """
    there = [host for host in hosts if host.name in named]
    listed = {model.name for host in there for model in host.models}
    gone = []
    for host in sorted(hosts, key=lambda host: (-host.left_ms, host.name)):
        own = [model for model in host.models if model.name not in listed]
        if own and host.name not in named:
            gone.append(msgspec.structs.replace(host, models=own))
            listed.update(model.name for model in own)
    return there, gone


def encode_worker(worker: WorkerInfo) -> bytes:
    """A roster entry as JSON."""
    return msgspec.json.encode(worker)


#: Inverse of `encode_worker`.
decode_worker: Final = msgspec.json.Decoder(WorkerInfo).decode


def encode_host(host: HostInfo) -> bytes:
    """A host as JSON."""
    return msgspec.json.encode(host)


#: Inverse of `encode_host`.
decode_host: Final = msgspec.json.Decoder(HostInfo).decode


def decode_workers(entries: Mapping[bytes, bytes]) -> dict[str, WorkerInfo]:
    """The workers of the roster, without entries that this version cannot read."""
    return dict(readable(entries, decode_worker))


def decode_hosts(entries: Mapping[bytes, bytes]) -> list[HostInfo]:
    """The announced hosts, without entries that this version cannot read."""
    return [host for _, host in readable(entries, decode_host)]
