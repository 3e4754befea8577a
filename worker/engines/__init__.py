"""What generates tokens inside a worker, behind one small interface.

Only this package and `worker.executor` may import vllm or torch. `simulated` imports neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenyard.errors import Code
from tokenyard.replies import Choice
from tokenyard.wire import Assignment


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that an engine is to serve, and how; what is left out is the engine's choice."""

    name: str  # that requests use
    path: str  # a folder, or a name that vLLM can resolve
    revision: str = ""
    dtype: str = "auto"
    max_model_len: int | None = None  # tokens, prompt and output together
    max_num_seqs: int = 64  # requests that run at once
    enforce_eager: bool = False  # no compilation: starts sooner, and small models run as fast
    kv_cache_gib: float = 0.0  # 0: what the device has left
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # more of vLLM's EngineArgs


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
    phases_s: dict[str, float] = field(default_factory=dict)  # seconds by phase of the start


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one choice of a request that streams. ``key`` is the lane entry.

    ``logprobs`` has one entry for each token, in the form of `worker.engines.logprobs`.
    """

    key: str
    index: int
    tokens: Sequence[int]
    text: str | None = None
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices of a request that has ended, with the tokens of all attempts."""

    key: str
    choices: Sequence[Choice]
    prompt_tokens: int
    prompt_logprobs: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Faulted:
    """A request that the engine cannot serve; its neighbours go on."""

    key: str
    code: Code
    message: str


EngineEvent = TokenDelta | Finished | Faulted


class Engine(Protocol):
    """Generates tokens for many requests at once. One thread owns it."""

    @property
    def info(self) -> EngineInfo:
        """What it serves."""

    def add(self, assignment: Assignment) -> None:
        """Take a request in; it continues behind ``assignment.published``.

        Raises `tokenyard.errors.InvalidRequest` where the request cannot be run as it is.
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

    def close(self) -> None:
        """Let go of the device; idempotent."""
