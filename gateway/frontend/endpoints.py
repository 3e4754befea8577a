"""The endpoints that vLLM's front end renders, as the OpenAPI document describes them.

vLLM's own document has endpoints that no gateway serves, and no types of answers. The functions
here are descriptions and are never called.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Header, Path, Query
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicErrorResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

from gateway.http.endpoints import ERRORS, After, Deleted, Key, Limit, ListPage, Order

EventId = Annotated[str | None, Header(alias="Last-Event-ID", pattern="^[0-9a-f]{32}:[0-9]{1,9}$")]


def generating_headers(
    idempotency_key: Key = None,
    x_request_id: Annotated[str | None, Header()] = None,
    last_event_id: EventId = None,
    x_request_timeout_ms: Annotated[int | None, Header(ge=1, le=10**10)] = None,
    x_tokenyard_on_disconnect: Annotated[Literal["continue", "cancel"] | None, Header()] = None,
    x_tokenyard_event_ids: Annotated[Literal["on", "off"], Header()] = "on",
    x_session_id: Annotated[str | None, Header()] = None,
    x_vllm_priority: Annotated[int | None, Header()] = None,
) -> None:
    """The headers of a request that generates."""


_EVENTS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, with `stream`"}
}
_ANTHROPIC: Final[dict[int | str, dict[str, Any]]] = {
    "default": {"model": AnthropicErrorResponse, "description": "An error"}
}
_generating: Final = [Depends(generating_headers)]
ResponseId = Annotated[str, Path(pattern="^resp_[0-9a-f]{32}$")]
router = APIRouter(responses=ERRORS)


@router.post(
    "/v1/chat/completions",
    tags=["generation"],
    dependencies=_generating,
    response_model=ChatCompletionResponse,
    responses=_EVENTS,
)
def create_chat_completion(body: ChatCompletionRequest) -> None:
    """Answer a chat."""


@router.post(
    "/v1/completions",
    tags=["generation"],
    dependencies=_generating,
    response_model=CompletionResponse,
    responses=_EVENTS,
)
def create_completion(body: CompletionRequest) -> None:
    """Continue a text."""


@router.post(
    "/v1/messages",
    tags=["generation"],
    dependencies=_generating,
    response_model=AnthropicMessagesResponse,
    responses=_EVENTS | _ANTHROPIC,
)
def create_message(body: AnthropicMessagesRequest) -> None:
    """Answer a chat in Anthropic's form."""


@router.post(
    "/v1/messages/count_tokens",
    tags=["tokens"],
    response_model=AnthropicCountTokensResponse,
    responses=_ANTHROPIC,
)
def count_tokens(body: AnthropicCountTokensRequest) -> None:
    """Count the tokens of a chat."""


@router.post(
    "/v1/responses",
    tags=["responses"],
    dependencies=_generating,
    response_model=ResponsesResponse,
    responses=_EVENTS,
)
def create_response(body: ResponsesRequest) -> None:
    """Make a response."""


@router.get(
    "/v1/responses/{response_id}",
    tags=["responses"],
    response_model=ResponsesResponse,
    responses=_EVENTS,
)
def retrieve_response(
    response_id: ResponseId,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=10**9)] = None,
    last_event_id: EventId = None,
) -> None:
    """Read a response as it is now, or its events."""


@router.delete("/v1/responses/{response_id}", tags=["responses"], response_model=Deleted)
def delete_response(response_id: ResponseId) -> None:
    """Delete a response; a request under way is cancelled."""


@router.post(
    "/v1/responses/{response_id}/cancel", tags=["responses"], response_model=ResponsesResponse
)
def cancel_response(response_id: ResponseId) -> None:
    """Cancel a response that was made with `background`."""


@router.get(
    "/v1/responses/{response_id}/input_items",
    tags=["responses"],
    response_model=ListPage[dict[str, Any]],
)
def list_input_items(
    response_id: ResponseId, limit: Limit = 20, after: After = None, order: Order = "desc"
) -> None:
    """List the input of a response, earlier turns included."""


@router.post("/tokenize", tags=["tokens"], response_model=TokenizeResponse)
def tokenize(body: TokenizeRequest) -> None:
    """Turn a text or a chat into tokens."""


@router.post("/detokenize", tags=["tokens"], response_model=DetokenizeResponse)
def detokenize(body: DetokenizeRequest) -> None:
    """Turn tokens into a text."""
