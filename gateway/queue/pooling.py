"""One input of a task that pools: from what vLLM's front ends ask an engine to the wire.

``asked`` has the fields of ``vllm.PoolingParams``, whichever version that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.http.errors import invalid
from tokenyard.protocol.wire import Input, PoolingParams

_CARRIED: Final = frozenset(PoolingParams.__struct_fields__) - {"truncate_prompt_tokens"}
#: With what stands elsewhere in a request, or is derived by the worker's engine.
_KNOWN: Final = _CARRIED | {"task", "requires_token_ids", "extra_kwargs", "output_kind"}
#: Where the second text of a pair begins.
_BOUNDARY: Final = "compressed_token_type_ids"
#: The front end has already cut the texts to these lengths.
_DONE: Final = ("max_tokens_per_query", "max_tokens_per_doc")


def wire_pooling(asked: Any) -> PoolingParams:
    """The parameters; raises `GatewayError` for one that the wire cannot carry."""
    for name in asked.__struct_fields__:
        if name not in _KNOWN and getattr(asked, name) is not None:
            raise invalid(name, "not carried through the queue")
    return msgspec.convert({name: getattr(asked, name) for name in _CARRIED}, PoolingParams)


def wire_input(ids: Sequence[int], asked: Any) -> Input:
    """The token ids, or those of a pair; raises `GatewayError` as above."""
    extra = dict(asked.extra_kwargs or {})
    boundary = extra.pop(_BOUNDARY, 0)
    for name in _DONE:
        extra.pop(name, None)
    if extra:
        raise invalid(min(extra), "not carried through the queue")
    prompt = list[Any](ids)
    return [prompt[:boundary], prompt[boundary:]] if 0 < boundary < len(prompt) else prompt
