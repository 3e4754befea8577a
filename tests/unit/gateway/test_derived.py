"""What vLLM draws at random depends on the request alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from gateway.http.context import CURRENT, RequestContext
from tests.unit.gateway.conftest import adder_tokenizer


def message(durable_id: str | None) -> str:
    """The events of a message with a thought, as vLLM writes them for a request."""
    adder_tokenizer()  # sets vLLM's environment first
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    from gateway.frontend import derived

    derived.replace_modules()

    async def pieces() -> AsyncGenerator[str, None]:
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        for delta in ({"role": "assistant"}, {"reasoning": "Hm"}, {"content": "So"}):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    async def write() -> str:
        if durable_id is not None:
            CURRENT.set(RequestContext(durable_id, "http", created=0.0))
        server = object.__new__(AnthropicServingMessages)
        return "".join([event async for event in server.message_stream_converter(pieces())])

    return asyncio.run(write())


def test_a_thought_is_signed_alike_by_all_gateways() -> None:
    first, again, other = message("request"), message("request"), message("another")

    assert "signature_delta" in first
    assert first == again != other


def test_outside_of_a_request_it_is_random() -> None:
    assert message(None) != message(None)
