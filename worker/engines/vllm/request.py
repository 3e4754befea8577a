"""A request in the engine, and what vLLM's parameters must differ in to run or continue it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tokenyard.protocol.wire import Assignment, SamplingParams
from worker.engines.logprobs import most, wanted
from worker.engines.resume import derive_seed, has_history


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request in the engine, with prompt and published tokens."""

    assignment: Assignment
    prompt: list[int]
    by_choice: tuple[list[int], ...]  # the published tokens of each choice
    media: Mapping[str, Any] | None = None  # what vLLM has made of them

    @classmethod
    def of(
        cls, assignment: Assignment, prompt: list[int], media: Mapping[str, Any] | None = None
    ) -> Self:
        """The request of an assignment, with its prompt as token ids."""
        indexes = range(assignment.request.params.n)
        published = tuple(map(assignment.published_of, indexes))
        return cls(assignment.without_media, prompt, published, media)

    def prompt_and(self, published: list[int]) -> dict[str, Any]:
        """The prompt and tokens behind it, as vLLM takes them."""
        tokens = self.prompt + published
        if self.media:
            return {**self.media, "prompt_token_ids": tokens}
        return {"type": "token", "prompt_token_ids": tokens}

    @property
    def reads_text(self) -> bool:
        """Whether its text is shown, or searched for stop strings."""
        return self.assignment.request.wants_text or bool(self.params.stop)

    @property
    def key(self) -> str:
        """The lane entry, and vLLM's request id."""
        return self.assignment.entry

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        return self.assignment.request.params

    @property
    def published(self) -> list[int]:
        """The published tokens of the first or only choice."""
        return self.by_choice[0]

    def seed_at_start(self) -> dict[str, Any]:
        """A seed for a stream without one; empty where it needs none.

        If this worker dies, another one can repeat the run only with a seed.
        """
        params = self.params
        if params.seed is None and params.temperature > 0 and has_history(params):
            return {"seed": derive_seed(self.assignment.sid, self.assignment.request.id)}
        return {}

    def changes_to_continue(self) -> dict[str, Any]:
        """Parameters to change when the only choice continues after its published tokens."""
        params, count = self.params, len(self.published)
        changes: dict[str, Any] = {
            "stop": None,  # `TextStream` finds them
            "min_tokens": max(0, params.min_tokens - count),
        }
        if params.max_tokens is not None:
            changes["max_tokens"] = params.max_tokens - count
        if (asks := wanted(params)) is not None:
            changes["prompt_logprobs"] = most(asks.top, params.prompt_logprobs or 0)
        if params.seed is not None:
            changes["seed"] = derive_seed(params.seed, count)
        return changes
