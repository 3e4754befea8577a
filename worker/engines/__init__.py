"""The interface of the engines that generate tokens in a worker.

Only this package and `worker.executor` may import vllm or torch. `simulated` imports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Choice, ErrorInfo
from tokenyard.protocol.wire import GENERATE, Assignment, Task
from worker.models import ModelSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The model and the limits of an engine."""

    engine: str  # vllm or simulated
    engine_version: str
    model: str  # the name in requests
    revision: str
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    max_num_seqs: int  # requests that it runs at once
    tokenizer: str = ""  # path or name of the Hugging Face tokenizer; "": none
    adapters: tuple[str, ...] = ()  # LoRA adapters, which requests name like models
    phases_s: dict[str, float] = field(default_factory=dict)  # seconds by phase of the load
    weights: str = ""  # path of the loaded checkpoint; "": the model's own
    cache_tokens: int = 0  # capacity of the prefix cache; 0: unknown or none
    tasks: tuple[Task, ...] = (GENERATE,)


class TokenDelta(Struct, frozen=True):
    """New tokens of one choice of a streaming request. ``key`` is the lane entry.

    ``logprobs`` has one entry per token, in the form of `worker.engines.logprobs`. The first delta
    of a request says how much of the prompt was cached and came to be, if that is known. Where
    n > 1, the last delta of a choice says how the choice ended.
    """

    key: str
    index: int
    tokens: Sequence[int]
    text: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    created_cache_tokens: int | None = None


class PoolingOutput(Struct, frozen=True):
    """What a task that pools has made of the inputs of a request; see `Result` for the fields."""

    data: bytes
    shapes: Sequence[Sequence[int] | None]
    errors: Mapping[int, ErrorInfo]
    input_tokens: Sequence[int]


class Finished(Struct, frozen=True):
    """All choices of a finished request, with the tokens of all attempts.

    A request that pools has one choice, without tokens.
    """

    key: str
    choices: Sequence[Choice]
    prompt_tokens: int
    prompt_logprobs: list[Any] | None = None
    cached_tokens: int | None = None  # of the prompt, from the prefix cache; None: unknown
    created_cache_tokens: int | None = None  # of the prompt, new in that cache
    pooling: PoolingOutput | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices, those of earlier attempts included."""
        return sum([len(choice.tokens) for choice in self.choices])


class RequestError(Struct, frozen=True):
    """A request that the engine cannot serve; other requests continue."""

    key: str
    code: Code
    message: str


EngineEvent = TokenDelta | Finished | RequestError


class Engine(Protocol):
    """Generates tokens for many requests at once. One thread owns it."""

    @property
    def info(self) -> EngineInfo:
        """The model and the limits."""

    def add(self, assignment: Assignment) -> None:
        """Add a request; it continues after the tokens ``assignment.published``.

        Raises `tokenyard.protocol.errors.InvalidRequest` if the request cannot run.
        """

    def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from another thread, when `step` has work that no call has given it."""

    def freeze(self, is_frozen: bool) -> None:
        """Generate nothing until it is called again; requests stay as they are."""

    def abort(self, keys: Iterable[str]) -> None:
        """Drop requests by lane entry; unknown ones are ignored."""

    def take_out(self, key: str) -> Finished | None:
        """Stop a request and return its output so far, or None if the request is unknown.

        Of a request without deadline or stream, the output may lack texts and logprobs, and all
        choices if the engine cannot tell their tokens.
        """

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work."""

    def progress(self) -> Mapping[str, int]:
        """Tokens made so far of the requests that yield nothing before their end, by lane entry."""

    @property
    def is_worn(self) -> bool:
        """Whether its process should be replaced once it is idle; any thread may ask."""

    def step(self) -> list[EngineEvent]:
        """Run one step for all running requests.

        A streaming request yields a `TokenDelta` for each step that generates tokens, except the
        last step: its tokens are in `Finished` only. (A choice that ends before its siblings
        yields its last tokens as a delta too.) The texts of the deltas together are a prefix of
        the text in `Finished`. A fault of the whole engine is an exception.
        """

    def sleep(self, level: int) -> None:
        """Free the device's memory: level 1 keeps the weights in host memory, level 2 drops them.

        Needs an engine without unfinished requests. Raises `Unsupported` if the engine cannot
        sleep.
        """

    def wake(self) -> None:
        """Wake from sleep, and reload the weights if they were dropped."""

    def reload(self, path: str) -> None:
        """Load the weights of the checkpoint in the folder ``path``; "": the model's own.

        Clears the prefix cache; unfinished requests continue after their tokens. Raises
        `Unsupported` if the weights cannot be loaded, and changes nothing.
        """

    def close(self) -> None:
        """Unload the model and free its memory; idempotent. The process stays warm."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process, in bytes."""

    host: int  # resident
    device: int | None = None  # on the GPU; None on a CPU

    @property
    def scarce(self) -> int:
        """The scarcer of the two: the device's memory if there is a device, else the host's."""
        return self.host if self.device is None else self.device


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Several processes of a host that hold one model together.

    The leader runs the engine and rank 0 and listens at ``address``, a Unix socket; the followers
    connect there.
    """

    address: str
    rank: int  # of this process
    devices: tuple[int, ...]  # by rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class SensorReading:
    """What the sensors of a device say; None where it has none."""

    temperature_c: int | None = None
    power_w: int | None = None


class Unsupported(Exception):
    """This engine or device does not support the operation; the message names an alternative."""


class DeviceUnusable(Exception):
    """No engine can ever run on this CPU or GPU; the message says what to do."""


class DeviceLost(Exception):
    """This process can no longer use its GPU and must end; a new process can."""


class Backend(Protocol):
    """Loads engines in a worker process, and keeps the process warm between them.

    One thread owns it and its engines; at most one engine exists at a time.
    """

    def warm_up(self) -> dict[str, float]:
        """Do once all that needs no model; returns seconds by phase.

        Raises `DeviceUnusable` if no engine can run here, and the errors of the engine.
        """

    def load(self, spec: ModelSpec, group: RankGroup | None = None, weights: str = "") -> Engine:
        """Load an engine, with ``weights`` from its first token; `Engine.reload` describes them.

        Raises the errors of the engine, after which the process should be replaced.
        """

    def attend(self, group: RankGroup) -> None:
        """Serve the leader of ``group`` until it releases this process, which is then warm again.

        After an exception the process must end.
        """

    def memory(self) -> Memory:
        """Current memory of this process."""

    def read_sensors(self) -> SensorReading:
        """The sensors of the device, for any thread; empty until it is warm, and on a CPU."""
