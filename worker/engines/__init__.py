"""What generates tokens inside a worker, behind one small interface.

Only this package and `worker.executor` may import vllm or torch. `simulated` imports neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Choice
from tokenyard.protocol.wire import Assignment
from worker.models import ModelSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves and how much at once."""

    engine: str  # vllm or simulated
    engine_version: str
    model: str  # the name that requests use
    revision: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    slots: int  # requests that run at once (vLLM's max_num_seqs)
    tokenizer: str = ""  # path or name of the Hugging Face tokenizer, "" where there is none
    adapters: tuple[str, ...] = ()  # LoRA adapters; requests name them as they name models
    phases_s: dict[str, float] = field(default_factory=dict)  # seconds by phase of the load
    weights: str = ""  # path of the checkpoint that stands in for the model's own; "": its own
    cache_tokens: int = 0  # that its prefix cache holds; 0: unknown, or it has none


class TokenDelta(Struct, frozen=True):
    """New tokens of one choice of a request that streams. ``key`` is the lane entry.

    ``logprobs`` has one entry for each token, in the form of `worker.engines.logprobs`.
    """

    key: str
    index: int
    tokens: Sequence[int]
    text: str | None = None
    logprobs: list[dict[str, Any]] | None = None


class Finished(Struct, frozen=True):
    """All choices of a request that has ended, with the tokens of all attempts."""

    key: str
    choices: Sequence[Choice]
    prompt_tokens: int
    prompt_logprobs: list[Any] | None = None
    cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None: not told


class RequestError(Struct, frozen=True):
    """A request that the engine cannot serve; its neighbours go on."""

    key: str
    code: Code
    message: str


EngineEvent = TokenDelta | Finished | RequestError


class Engine(Protocol):
    """Generates tokens for many requests at once. One thread owns it."""

    @property
    def info(self) -> EngineInfo:
        """What it serves."""

    def add(self, assignment: Assignment) -> None:
        """Take a request in; it continues behind ``assignment.published``.

        Raises `tokenyard.protocol.errors.InvalidRequest` where the request cannot be run as it is.
        """

    def abort(self, keys: Iterable[str]) -> None:
        """Forget requests, by lane entry; unknown ones are ignored."""

    def take_out(self, key: str) -> Finished | None:
        """Stop a request and give what it has made so far; None where it is not here.

        For requests with a deadline; of others that do not stream nothing may be known.
        """

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> list[EngineEvent]:
        """Generate once for all running requests.

        A request that streams yields a `TokenDelta` for each step that made tokens, except the
        last, whose tokens stand in `Finished` only. (A choice that ends before its siblings
        yields its last tokens as a delta too.) The texts of the deltas are a beginning of the text
        in `Finished`. A fault of the whole engine is an exception.
        """

    def sleep(self, level: int) -> None:
        """Let go of the device's memory: at 1 the weights stay in the host's, at 2 they go too.

        Only without unfinished requests. Raises `Unsupported` where the engine cannot.
        """

    def wake(self) -> None:
        """Come back from sleep as if nothing had been, weights reloaded where they were gone."""

    def reset(self) -> None:
        """Forget the prefix cache."""

    def reload(self, path: str) -> None:
        """Take the weights of the checkpoint in the folder ``path``, "" for the model's own.

        The prefix cache is forgotten; unfinished requests go on behind their tokens. Raises
        `Unsupported` where that cannot be, and all is as before.
        """

    def profile(self, *, start: bool) -> None:
        """Start or stop the engine's profiler; raises `Unsupported` where it has none."""

    def close(self) -> None:
        """Let go of the model and its memory; idempotent. The process stays warm."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process holds, in bytes."""

    host: int  # resident
    device: int | None = None  # on the GPU; None on a CPU

    @property
    def scarce(self) -> int:
        """The one that matters: the device's where there is a device."""
        return self.host if self.device is None else self.device


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Several processes of a host that hold one model together.

    Its leader runs the engine and rank 0 and listens at ``address``, a Unix socket; the others
    attach there.
    """

    address: str
    rank: int  # of this process
    devices: tuple[int, ...]  # by rank

    @property
    def size(self) -> int:
        """How many processes it has."""
        return len(self.devices)


class Unsupported(Exception):
    """This engine, or this device, cannot do what was asked; the message says what can."""


class DeviceUnusable(Exception):
    """No engine can run on this CPU or GPU, now or later; the message says what to do."""


class DeviceLost(Exception):
    """This process can do nothing on its GPU any more and must end; a new one can."""


class Backend(Protocol):
    """What a worker process is before it holds a model, and between two models.

    One thread owns it and the engines that it makes; at most one engine lives at a time.
    """

    def warm_up(self) -> dict[str, float]:
        """Pay everything that needs no model, once; seconds by phase.

        Raises `DeviceUnusable` where no engine can run here, and what the engine raises.
        """

    def load(self, spec: ModelSpec, group: RankGroup | None = None, weights: str = "") -> Engine:
        """Make an engine, with ``weights`` from its first token on; see `Engine.reload` for them.

        Raises what the engine raises; the process then is as warm as before, but after
        `DeviceLost`.
        """

    def attend(self, group: RankGroup) -> None:
        """Lend this process to the leader of ``group`` until it lets go; then it is warm again.

        A fault is an exception, and the process must end.
        """

    def memory(self) -> Memory:
        """What this process holds now."""
