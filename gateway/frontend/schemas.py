"""Types of bodies, answers and parameters, as the OpenAPI document describes them.

The routes name them: vLLM's take seconds to import. The functions here are for their parameters.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from fastapi import Form, Header, Path, Query, UploadFile
from openai.types import Batch, FileObject
from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.pooling.classify import protocol as classes
from vllm.entrypoints.pooling.embed import protocol as embeddings
from vllm.entrypoints.pooling.pooling import protocol as pooling
from vllm.entrypoints.pooling.scoring import protocol as scoring
from vllm.entrypoints.serve.tokenize import protocol as tokens
from vllm.entrypoints.speech_to_text.transcription.protocol import (
    TranscriptionRequest,
    TranscriptionResponseVariant,
)
from vllm.entrypoints.speech_to_text.translation.protocol import (
    TranslationRequest,
    TranslationResponseVariant,
)

from gateway.batches.records import ENDPOINTS
from gateway.http.records import MAX_KEY

AnthropicError = anthropic.AnthropicErrorResponse
MessageRequest, Message = anthropic.AnthropicMessagesRequest, anthropic.AnthropicMessagesResponse
CountTokensRequest = anthropic.AnthropicCountTokensRequest
TokenCount = anthropic.AnthropicCountTokensResponse
ChatCompletionRequest = chat.ChatCompletionRequest
ChatCompletion = chat.ChatCompletionResponse
CompletionRequest, Completion = completion.CompletionRequest, completion.CompletionResponse
ResponseRequest, Response = responses.ResponsesRequest, responses.ResponsesResponse
TokenizeRequest, TokenizeResponse = tokens.TokenizeRequest, tokens.TokenizeResponse
DetokenizeRequest, DetokenizeResponse = tokens.DetokenizeRequest, tokens.DetokenizeResponse
EmbeddingRequest, Embeddings = embeddings.EmbeddingRequest, embeddings.EmbeddingResponse
CohereEmbedRequest = embeddings.CohereEmbedRequest
CohereEmbeddings = embeddings.CohereEmbedResponse
PoolingRequest, Pooling = pooling.PoolingRequest, pooling.PoolingResponse
ClassificationRequest, Classes = classes.ClassificationRequest, classes.ClassificationResponse
ScoreRequest, Scores = scoring.ScoreRequest, scoring.ScoreResponse
RerankRequest, Ranks = scoring.RerankRequest, scoring.RerankResponse
Transcription, Translation = TranscriptionResponseVariant, TranslationResponseVariant
T = TypeVar("T")


class ErrorObject(BaseModel):
    """What went wrong, in OpenAI's form; Anthropic's has only type and message."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(BaseModel):
    """Every answer that is not the one asked for."""

    error: ErrorObject


class ListPage(BaseModel, Generic[T]):
    """One page of a list."""

    object: Literal["list"]
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelCard(BaseModel):
    """A model or an adapter of the yard."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    state: Literal["warm", "loading", "asleep", "cold", "failed"]
    fault: str | None = Field(default=None, description="Why this gateway cannot serve it.")


class ModelCards(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class Deleted(BaseModel):
    """The answer to a DELETE."""

    id: str
    object: str
    deleted: bool


class Lifetime(BaseModel):
    """After which time a file is not found any more."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class Versions(BaseModel):
    """Of vLLM, whose front end this is, and of Tokenyard."""

    version: str
    tokenyard: str


class NewBatch(BaseModel):
    """What ``POST /v1/batches`` takes."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    completion_window: str = Field(pattern="^[0-9]{1,7}[smhd]$", examples=["24h"])
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16
    )
    output_expires_after: Lifetime | None = None


FilePage = ListPage[FileObject]
BatchPage = ListPage[Batch]
ItemPage = ListPage[dict[str, Any]]
AnyObject = dict[str, Any]

Order = Annotated[Literal["asc", "desc"], Query()]
After = Annotated[str | None, Query(description="The id behind which the page begins.")]
Limit = Annotated[int, Query(ge=1, le=100)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=MAX_KEY)]

EventId = Annotated[str | None, Header(alias="Last-Event-ID", pattern="^[0-9a-f]{32}:[0-9]{1,9}$")]
#: By the name of the path's parameter.
PATH_PARAMETERS: Final[dict[str, Any]] = {
    "model": Annotated[str, Path(min_length=1)],
    "file_id": Annotated[str, Path(pattern="^file-[0-9a-f]{32}$")],
    "batch_id": Annotated[str, Path(pattern="^batch_[0-9a-f]{32}$")],
    "response_id": Annotated[str, Path(pattern="^resp_[0-9a-f]{32}$")],
}


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


def batch_headers(idempotency_key: Key = None) -> None:
    """The headers of a request that creates a batch."""


def file_form(
    file: UploadFile,
    purpose: Annotated[Literal["batch", "user_data", "vision"], Form()],
    expires_anchor: Annotated[
        Literal["created_at"] | None, Form(alias="expires_after[anchor]")
    ] = None,
    expires_seconds: Annotated[
        int | None, Form(alias="expires_after[seconds]", ge=3600, le=2_592_000)
    ] = None,
) -> None:
    """The form of an upload."""


_FORM: Final = Form(media_type="multipart/form-data")


def transcription_form(form: Annotated[TranscriptionRequest, _FORM]) -> None:
    """The form of a transcription."""


def translation_form(form: Annotated[TranslationRequest, _FORM]) -> None:
    """The form of a translation."""


def file_page(
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: After = None,
    order: Order = "desc",
) -> None:
    """Which files are listed."""


def page(limit: Limit = 20, after: After = None, order: Order = "desc") -> None:
    """Which items of a list are shown."""


def replay(
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=10**9)] = None,
    last_event_id: EventId = None,
) -> None:
    """Which events of a response are sent again."""
