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
    """Let a renderer tokenize a short text where it is called, and others in its thread.

    A tokenizer keeps the truncation of its last call, so it may serve one call at a time: while the
    thread has one, short texts go there, too.
    """
    # vLLM has no setting for this. A version without these two keeps its own way.
    in_thread: Callable[..., Awaitable[Any]] | None
    in_thread = getattr(renderer, "_tokenize_prompt_async", None)
    here: Callable[..., Any] | None = getattr(renderer, "_tokenize_prompt", None)
    if in_thread is None or here is None:
        return
    others = 0

    async def tokenize(prompt: Any, params: Any) -> Any:
        nonlocal others
        if not others and len(prompt["prompt"]) <= SHORT:
            return here(prompt, params)
        others += 1
        try:
            return await in_thread(prompt, params)
        finally:
            others -= 1

    renderer._tokenize_prompt_async = tokenize  # noqa: SLF001
