"""Ids and times of answers, derived from the request.

vLLM draws ids (``call_...``, ``msg_...``) at random and takes ``created`` from the clock. Two
gateways that render the same request must write the same bytes, so both come from its
`RequestContext` here. `install` must run before vLLM's entry points are imported.
"""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any, Final

from gateway.frontend.turns import merge_in_turns
from gateway.http.context import CURRENT

_PACKAGES: Final = ("vllm.entrypoints.", "vllm.parser", "vllm.tool_parsers", "vllm.renderers")


class _Clock(ModuleType):
    """The module ``time``, whose ``time()`` stands still while a request is served."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def time() -> float:
        """Unix seconds."""
        context = CURRENT.get()
        return time.time() if context is None else context.created


def install() -> None:
    """Replace vLLM's source of ids; raises `RuntimeError` where it is too late."""
    import vllm.utils
    import vllm.utils.async_utils

    if any(name.startswith("vllm.entrypoints.openai") for name in sys.modules):
        raise RuntimeError("vLLM's entry points were imported before their ids were replaced")
    original = vllm.utils.random_uuid

    def derived_id() -> str:
        context = CURRENT.get()
        return original() if context is None else context.draw_id()

    vllm.utils.random_uuid = derived_id
    vllm.utils.async_utils.merge_async_iterators = merge_in_turns


def replace_clocks() -> int:
    """Give the imported entry points the derived clock; returns the number of modules."""
    clock, count = _Clock("time"), 0
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES) and getattr(module, "time", None) is time:
            module.time = clock  # type: ignore[attr-defined]
            count += 1
    return count
