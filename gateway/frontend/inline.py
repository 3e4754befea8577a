"""Tokenizes short prompts in the event loop.

vLLM does that in a thread. For a short prompt it takes less time than to hand it over and to get
the interpreter back, twice, beside the tokens of other streams.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer

#: Longest text that is tokenized in the event loop; takes a millisecond or two.
SHORT: Final = 4096


def tokenize_short_inline(renderer: BaseRenderer[Any]) -> None:
    """Let a renderer tokenize a short text where it is called, and others in its thread."""
    # vLLM has no setting for this.
    in_thread: Callable[..., Awaitable[Any]] = renderer._tokenize_prompt_async  # noqa: SLF001

    async def tokenize(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) <= SHORT:
            return renderer._tokenize_prompt(prompt, params)  # noqa: SLF001
        return await in_thread(prompt, params)

    renderer._tokenize_prompt_async = tokenize  # noqa: SLF001
