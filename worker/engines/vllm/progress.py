"""How far vLLM is with a request of which it returns nothing before the end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("tokenyard.worker")


def tokens_so_far(engine: Any, request_id: str) -> Sequence[list[int]]:
    """The tokens of each choice of a running request; none where this vLLM does not tell.

    Reads what vLLM's output processor has for the text of the answer, which is no public API.
    """
    try:
        processor = engine.output_processor
        ids = processor.external_req_ids.get(request_id, ())
        states = [processor.request_states[one] for one in ids]
        found = {one.request_index: list(one.detokenizer.output_token_ids) for one in states}
        for parent in {
            id(one.parent_req): one.parent_req for one in states if one.parent_req
        }.values():
            for output in parent.output_aggregator:  # of choices that have ended
                if output is not None:
                    found.setdefault(output.index, list(output.token_ids))
    except (AttributeError, KeyError, TypeError) as error:
        _warn(repr(error))
        return ()
    return [found[index] for index in sorted(found)]


@functools.cache
def _warn(error: str) -> None:
    """Once: it is asked each second."""
    logger.warning("vLLM does not tell the tokens of a request so far: %s", error)
