"""Requests, assignments and replies for tests, with defaults for every argument."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tokenyard.protocol.media import NO_MEDIA, Media
from tokenyard.protocol.replies import Reply, Status
from tokenyard.protocol.wire import Assignment, Request, pack_tokens, request_fields
from tokenyard.protocol.worker_info import WorkerInfo, encode_worker


def random_name(prefix: str) -> str:
    """A unique name."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def make_request(
    request_id: str | None = None,
    *,
    tokens: Sequence[int] | None = None,
    prompt: str | None = None,
    messages: list[dict[str, Any]] | None = None,
    **fields: Any,
) -> Request:
    """A valid request; without any prompt it has three tokens."""
    if tokens is None and prompt is None and messages is None:
        tokens = [1, 2, 3]
    return Request(
        id=request_id or random_name("request"),
        tokens=None if tokens is None else pack_tokens(tokens),
        prompt=prompt,
        messages=messages,
        **fields,
    )


def framed(request_id: str | None = None, *, client: str = "framed", **fields: Any) -> Request:
    """A request whose replies come in frames, like those of Tokenyard's client."""
    return make_request(request_id, client=client, reply_to=f"replies:{client}", **fields)


def framed_elsewhere(
    request_id: str | None = None, *, client: str = "http.acme", **fields: Any
) -> Request:
    """A request of a gateway: its replies come in frames on one stream for all its clients."""
    reply_to = f"replies:gateway.{uuid.uuid4().hex}"
    return make_request(request_id, client=client, reply_to=reply_to, **fields)


def entry_fields(request: Request, **more: bytes) -> dict[bytes, bytes]:
    """A request as a plain entry, the way Redis returns it, and more fields."""
    return stored(request_fields(request) | more)


def stored(fields: Mapping[str, object]) -> dict[bytes, bytes]:
    """Fields the way Redis returns them."""
    return {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }


def make_assignment(
    request: Request | None = None,
    *,
    entry: str = "1-0",
    sid: str = "normal/1-0",
    attempt: int = 1,
    crashes: int = 0,
    published: Sequence[int] = (),
    choices: bytes = b"",
    media: Media = NO_MEDIA,
) -> Assignment:
    """A request on a lane."""
    return Assignment(
        request=request or make_request(),
        entry=entry,
        sid=sid,
        attempt=attempt,
        crashes=crashes,
        published=pack_tokens(published),
        choices=choices,
        media=media,
    )


def make_delta(request_id: str, seq: int, tokens: Sequence[int], **fields: Any) -> Reply:
    """A delta of ``tokens`` after ``seq`` others."""
    return Reply(id=request_id, event="delta", seq=seq, tokens=pack_tokens(tokens), **fields)


def make_result(
    request_id: str,
    tokens: Sequence[int] = (),
    *,
    seq: int = 0,
    status: Status = "completed",
    **fields: Any,
) -> Reply:
    """A result with all ``tokens``, ``seq`` of which were published earlier."""
    packed = pack_tokens(tokens)
    return Reply(id=request_id, event="result", seq=seq, tokens=packed, status=status, **fields)


def make_worker_info(name: str = "w", **fields: Any) -> WorkerInfo:
    """The roster entry of a ready worker."""
    values: dict[str, Any] = {
        "state": "ready",
        "model": "adder",
        "max_num_seqs": 4,
        "lane_limit": 6,
    }
    return WorkerInfo(name=name, **(values | fields))


def worker_json(name: str = "w", **fields: Any) -> bytes:
    """The same as the JSON that `Scripts.register` takes."""
    return encode_worker(make_worker_info(name, **fields))
