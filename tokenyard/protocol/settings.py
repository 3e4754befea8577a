"""Configuration of the long-lived processes: frozen, read once at the door.

The command lines fill these from options and ``TOKENYARD_*`` variables; nothing else reads the
environment. Every fault is reported at once. Units stand in the names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.keys import NAME_RULE, is_name
from tokenyard.protocol.sampling import MAX_GRAMMAR_BYTES

PolicyName = Literal["round_robin", "least_loaded", "prefix_affinity", "megatron", "vllm"]
EngineName = Literal["vllm", "simulated"]
StartFailureAction = Literal["exit", "retry"]
DeviceName = Literal["auto", "cuda", "cpu"]


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file; raises `SettingsError` if it cannot be read or is not TOML."""
    import tomllib  # late: few commands read such a file

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError([f"{path}: is not TOML: {error}"]) from error


def default_name(role: str) -> str:
    """A name for a process that no other on this or another host is likely to have."""
    host = socket.gethostname().split(".")[0]
    return f"{role}-{host}-{os.getpid()}"


class Bound(NamedTuple):
    """What the value of a setting must be; stands in the setting's type."""

    is_kept: Callable[[Any], bool]
    fault: str


def at_least(least: int) -> Bound:
    """The bound of a count that is not smaller."""
    return Bound(lambda value: value >= least, f"must be at least {least}")


Number = TypeVar("Number", int, float)
AtLeastOne = Annotated[int, at_least(1)]
Positive = Annotated[float, Bound(lambda value: value > 0, "must be positive")]
NotNegative = Annotated[Number, Bound(lambda value: value >= 0, "must not be negative")]
Share = Annotated[
    float,
    Bound(lambda value: 0 < value <= 1, "must be above 0 and at most 1, such as 0.1 for 10 %"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """What every long-lived process needs to know."""

    #: Empty where there is no yard: models then come from the program (`worker.local.api`).
    redis_url: str
    yard: str = "main"
    name: str
    #: Where Prometheus may read the metrics (docs/metrics.md); 0: nowhere.
    metrics_port: Annotated[
        int, Bound(lambda port: 0 <= port < 2**16, "must be from 1 to 65535, or 0 for none")
    ] = 0
    metrics_host: str = "127.0.0.1"
    #: A main loop that has not come round for so long hangs, as ``/livez`` beside the metrics says.
    liveness_timeout_s: Positive = 60.0

    def __post_init__(self) -> None:
        if errors := [*self._shared_errors(), *self._errors()]:
            raise SettingsError(errors)

    def _errors(self) -> Iterator[str]:
        raise NotImplementedError

    def _shared_errors(self) -> Iterator[str]:
        for label, name in (("yard", self.yard), ("name", self.name)):
            if not is_name(name):
                yield f"{label} {name!r}: {NAME_RULE}"
        for label, hint in get_type_hints(type(self), include_extras=True).items():
            for bound in getattr(hint, "__metadata__", ()):
                if not bound.is_kept(getattr(self, label)):
                    yield f"{label}: {bound.fault}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(ProgramSettings):
    """What coordinators and controllers need to know beside that."""

    #: Longest blocking read. Must stay below the socket's time-out.
    block_ms: AtLeastOne = 1_000
    reply_maxlen: AtLeastOne = 10_000
    #: Where spans are sent, as OTLP over HTTP. Without it OpenTelemetry's own variables count.
    otlp_endpoint: str = ""

    def _shared_errors(self) -> Iterator[str]:
        # Not super() alone: a dataclass with slots is another class.
        yield from super(ServiceSettings, self)._shared_errors()
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            yield "otlp_endpoint: must be an http:// or https:// URL"


#: Beyond it a long request would count for more than scripts bill at once.
TokenWeight = Annotated[
    float, Bound(lambda weight: 0 < weight <= 1000, "must be above 0 and at most 1000")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings(ServiceSettings):
    """What a coordinator needs to know."""

    name: str = field(default_factory=lambda: default_name("coordinator"))
    #: Nothing is dispatched before this many workers have joined.
    expect_workers: NotNegative[int] = 0
    #: How a worker is chosen; docs/routing.md compares them.
    policy: PolicyName = "round_robin"
    #: Workers in the order of their names, requests in the order of arrival, nothing else counts.
    deterministic: bool = False
    #: Where each decision is recorded, one JSON object a line.
    record: Path | None = None
    #: The leader's lease: so long a yard stands still when its leader is killed.
    lease_ms: Annotated[int, at_least(500)] = 5_000
    #: Most requests waiting in all intakes together (vLLM's name).
    max_num_queued_reqs: AtLeastOne = 100_000
    #: Most prompt tokens of the requests waiting, as far as they came by `submit` (vLLM's name).
    max_num_queued_tokens: AtLeastOne = 50_000_000
    #: Requests of class normal and below may take this share of both bounds, and so may low ones:
    #: the rest is room for higher classes alone.
    max_normal_share: float = 0.9
    max_low_share: float = 0.8
    #: What a token of a prompt and one of an answer count for a tenant's share.
    input_token_weight: TokenWeight = 1.0
    output_token_weight: TokenWeight = 2.0
    #: Waiting requests that the leader keeps in memory, about. Among these it serves models,
    #: classes and clients in turn; the rest of a longer queue comes when they are served.
    max_held: AtLeastOne = 100_000
    #: Most bytes of one request.
    max_request_bytes: AtLeastOne = 4 * 1024 * 1024
    #: Most entries handed over in one script call.
    max_batch: AtLeastOne = 256
    #: Workers that may be lost with a request, for whatever reason, before it must run alone.
    max_crashes: AtLeastOne = 3
    #: Workers that may crash while a request runs alone before it is given up. One crash may be
    #: a coincidence.
    max_crashed_alone: AtLeastOne = 2
    #: Workers that may be killed from outside while a request runs alone before it is given up.
    max_lost_alone: AtLeastOne = 3
    #: Times that an engine may fail to serve a request before it is given up.
    max_faults: AtLeastOne = 3
    #: Most of a model's workers that try suspects of a crash at once; one at least.
    max_trial_share: Share = 0.5
    #: A stream on trial that has published so many more tokens is innocent.
    trial_tokens: AtLeastOne = 8
    #: Any other request on trial that has run for so long is, until the next crash.
    trial_s: Positive = 5.0
    #: Workers keep the models that they hold: none is loaded because requests wait for it.
    static: bool = False
    #: A model waits no longer for a worker that serves another one; the models file may say more.
    #: 0: as long as follows from what swaps cost on each host, and from the share below.
    max_model_wait_s: NotNegative[float] = 0.0
    #: Most of a device's time that swaps of models may take, where their cost decides.
    max_swap_share: Share = 0.1
    #: A request whose lane entry somebody has deleted ends as lost, unless its worker, which may
    #: have read it before, ends it within so long.
    lost_entry_wait_s: NotNegative[float] = 60.0
    dead_maxlen: AtLeastOne = 10_000

    def _errors(self) -> Iterator[str]:
        if not 0 < self.max_low_share <= self.max_normal_share <= 1:
            yield "max_low_share, max_normal_share: must be above 0, at most 1, and low's no larger"
        if self.deterministic and not self.expect_workers:
            yield "deterministic: needs expect_workers, so that the set of workers is known"
        if self.deterministic and self.policy != "round_robin":
            yield f"deterministic: deals requests out in turn; leave policy {self.policy} out"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """What a controller and its worker processes need to know."""

    #: Prefix of the names of this host's workers.
    name: str = field(default_factory=lambda: default_name("worker"))
    engine: EngineName = "vllm"
    #: Folder or Hugging Face name of the model.
    model: str = ""
    #: The name that requests use for it; the last part of ``model`` where empty.
    model_name: str = ""
    revision: str = ""
    #: File that lists the models that may be loaded (docs/models.md); then `model` stays empty.
    models: Path | None = None
    #: Devices of this host; each has one worker process that is awake.
    slots: AtLeastOne = 1
    #: Warm processes beside those, to stand in for one that dies.
    spares: NotNegative[int] = 0
    #: Engines that may sleep on each device beside the one that is awake.
    sleepers: NotNegative[int] = 0
    #: What engines use; ``auto`` asks vLLM and torch.
    device: DeviceName = "auto"
    #: GPUs by index or UUID, MIG instances by UUID, one for each slot; on a CPU empty.
    devices: tuple[str, ...] = ()
    dtype: str = "auto"
    #: Tokens, prompt and output together; 0: what the model allows.
    max_model_len: int = 0
    #: Requests that an engine runs at once (vLLM's name).
    max_num_seqs: AtLeastOne = 256
    #: No graph capture and no compilation: starts sooner; for tiny models and for the CPU.
    enforce_eager: bool = False
    #: Further arguments of the engine, by vLLM's own names, as JSON.
    engine_args: str = "{}"
    #: The workers' leases; renewed three times as often.
    lease_ms: Annotated[int, at_least(1_000)] = 30_000
    #: Longest time without a sign of life of a process that warms up, or loads or unloads a model.
    start_timeout_s: Positive = 600.0
    #: Longest time for that altogether, with downloads and compilations.
    load_timeout_s: Positive = 7200.0
    #: Before a model gives way, its running requests may finish for so long; the rest goes back.
    drain_timeout_s: Positive = 600.0
    #: Part of its warm memory by which a process may grow steadily in six unloads; above it, a new
    #: one.
    leak_tolerance: NotNegative[float] = 0.02
    #: The same in MiB: the larger one counts.
    leak_floor_mib: NotNegative[float] = 64.0
    #: A busy engine that makes no step for so long is killed.
    hang_timeout_s: Positive = 60.0
    #: Least time between two deltas of a stream that names none, while a worker has more than 32;
    #: fewer, and the first, get each token.
    stream_interval_ms: NotNegative[int] = 30
    #: Most bytes of a constraint on the text (`structured_outputs`), as JSON.
    max_grammar_bytes: AtLeastOne = MAX_GRAMMAR_BYTES
    #: A request is refused where its grammar takes longer to compile.
    grammar_timeout_s: Positive = 10.0
    #: On SIGTERM running requests may finish for so long; what is left is handed back.
    grace_s: NotNegative[float] = 30.0
    #: First and longest pause before a dead process is started again.
    backoff_s: Positive = 0.5
    max_backoff_s: Positive = 30.0
    #: Failures of the same kind before any process of this host was of use: that is enough.
    max_start_failures: AtLeastOne = 3
    #: What then: end with status 5, or say so once and go on trying with `max_backoff_s`.
    on_start_failure: StartFailureAction = "exit"
    #: Simulated engine only: prefill tokens/s, seconds for a decode step (0: no limit).
    simulated_prefill_rate: float = 0.0
    simulated_step_s: float = 0.0
    #: Simulated engine only: tokens that its prefix cache holds (0: it has none).
    simulated_cache_tokens: int = 0
    #: Simulated engine only: seconds that loading a model takes.
    simulated_load_s: NotNegative[float] = 0.0
    #: Simulated engine only: name and hit count of a point at which the process kills itself.
    crash_point: str = ""

    @property
    def serves(self) -> str:
        """Name under which requests ask for the model."""
        if self.model_name:
            return self.model_name
        return Path(self.model).name if self.model else "simulated"

    def _errors(self) -> Iterator[str]:
        yield from self._model_errors()
        try:
            msgspec.json.decode(self.engine_args, type=dict)
        except msgspec.MsgspecError as error:
            yield f"engine_args: must be a JSON object: {error}"

    def _model_errors(self) -> Iterator[str]:
        if self.models and (self.model or self.model_name):
            yield "models: the file names the models; give either it or one model"
        if self.models and not self.models.is_file():
            yield f"models: no file at {self.models}"
        if self.redis_url and self.engine == "vllm" and not self.model and not self.models:
            yield "model: the vllm engine needs one (a folder or a Hugging Face name), or a file"
        if self.devices and len(self.devices) != self.slots:
            yield f"devices: {len(self.devices)} given for {self.slots} slots"
        if self.devices and self.device == "cpu":
            yield "devices: are GPUs; leave them out with device cpu"
