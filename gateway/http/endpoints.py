"""The gateway's own endpoints as its OpenAPI document describes them; `Gateway` serves them.

The functions here are descriptions and are never called.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from fastapi import APIRouter, Form, Header, Path, Query, Response, UploadFile
from openai.types import Batch, FileObject
from pydantic import BaseModel, ConfigDict, Field

from gateway.http.records import MAX_KEY

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
    state: Literal["warm", "loading", "asleep", "cold"]
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


class NewBatch(BaseModel):
    """What ``POST /v1/batches`` takes."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: str = Field(pattern="^[0-9]{1,7}[smhd]$", examples=["24h"])
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16
    )
    output_expires_after: Lifetime | None = None


Order = Annotated[Literal["asc", "desc"], Query()]
After = Annotated[str | None, Query(description="The id behind which the page begins.")]
Limit = Annotated[int, Query(ge=1, le=100)]
FileId = Annotated[str, Path(pattern="^file-[0-9a-f]{32}$")]
BatchId = Annotated[str, Path(pattern="^batch_[0-9a-f]{32}$")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=MAX_KEY)]

ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "default": {"model": ErrorAnswer, "description": "An error"}
}
#: Served without a key.
_OPEN: Final[dict[str, Any]] = {"security": []}
router = APIRouter(responses=ERRORS)


@router.get("/v1/models", tags=["models"], response_model=ModelCards)
def list_models() -> None:
    """List the models and adapters that the key may use, loaded or not."""


@router.get("/v1/models/{model}", tags=["models"], response_model=ModelCard)
def retrieve_model(model: Annotated[str, Path(min_length=1)]) -> None:
    """Describe one model or adapter."""


@router.post("/v1/files", tags=["files"], response_model=FileObject)
def create_file(
    file: UploadFile,
    purpose: Annotated[Literal["batch"], Form()],
    expires_anchor: Annotated[
        Literal["created_at"] | None, Form(alias="expires_after[anchor]")
    ] = None,
    expires_seconds: Annotated[
        int | None, Form(alias="expires_after[seconds]", ge=3600, le=2_592_000)
    ] = None,
) -> None:
    """Store a file."""


@router.get("/v1/files", tags=["files"], response_model=ListPage[FileObject])
def list_files(
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: After = None,
    order: Order = "desc",
) -> None:
    """List the tenant's files."""


@router.get("/v1/files/{file_id}", tags=["files"], response_model=FileObject)
def retrieve_file(file_id: FileId) -> None:
    """Describe a file."""


@router.delete("/v1/files/{file_id}", tags=["files"], response_model=Deleted)
def delete_file(file_id: FileId) -> None:
    """Delete a file that no batch under way reads."""


@router.get(
    "/v1/files/{file_id}/content",
    tags=["files"],
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The bytes"}},
)
def download_file(file_id: FileId) -> None:
    """Read the content of a file."""


@router.post("/v1/batches", tags=["batches"], response_model=Batch)
def create_batch(batch: NewBatch, idempotency_key: Key = None) -> None:
    """Begin a batch over the lines of a file."""


@router.get("/v1/batches", tags=["batches"], response_model=ListPage[Batch])
def list_batches(limit: Limit = 20, after: After = None, order: Order = "desc") -> None:
    """List the tenant's batches."""


@router.get("/v1/batches/{batch_id}", tags=["batches"], response_model=Batch)
def retrieve_batch(batch_id: BatchId) -> None:
    """Describe a batch."""


@router.post("/v1/batches/{batch_id}/cancel", tags=["batches"], response_model=Batch)
def cancel_batch(batch_id: BatchId) -> None:
    """Cancel a batch; lines without a result get an error."""


@router.get("/health", tags=["probes"], response_model=dict[str, Any], openapi_extra=_OPEN)
def health() -> None:
    """200 if the broker answers, a coordinator leads, and the gateway is not stopping."""


@router.get("/livez", tags=["probes"], response_model=dict[str, Any], openapi_extra=_OPEN)
def livez() -> None:
    """200 while the process serves."""


@router.get("/openapi.json", tags=["probes"], response_model=dict[str, Any])
def openapi() -> None:
    """Return this document."""
