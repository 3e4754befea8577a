"""Errors as OpenAI's clients expect them, and those of Anthropic's API."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tokenyard.protocol.errors import Code, http_status, http_type
from tokenyard.protocol.replies import ErrorInfo

if TYPE_CHECKING:
    from starlette.types import Message, Send

#: A host tries again to load a model that failed there after a pause of so long, about.
LOAD_AGAIN_S: Final = 10.0


class GatewayError(Exception):
    """An answer other than the one asked for, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        retry_after_s: float | None = None,
        extra_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or http_type(status)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self._extra_headers = extra_headers

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that tell clients whether, when and where to ask again."""
        if self._extra_headers is not None:
            return self._extra_headers
        if self.retry_after_s is None:
            is_final = self.status in (409, 422) or self.code == Code.QUOTA_EXCEEDED
            return {"x-should-retry": "false"} if is_final else {}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_s))),
            "retry-after-ms": str(math.ceil(self.retry_after_s * 1000)),
            "x-should-retry": "true",
        }

    def body(self) -> bytes:
        """The JSON of the answer; `MessagesAnswer` gives it the other form."""
        inner: dict[str, Any] = {"message": self.message, "type": self.kind, "param": self.param}
        return as_json({"error": inner | {"code": self.code or str(self.status)}})


def as_json(body: dict[str, Any]) -> bytes:
    """Compact JSON; what is no Unicode becomes question marks."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def message_of(body: bytes) -> str:
    """The message of an error in OpenAI's form, or in vLLM's; "" where it has none."""
    try:
        read: Any = json.loads(body)
        return str(read["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""


def invalid(name: str, message: str) -> GatewayError:
    """The error of one field, header or parameter that cannot be used: status 400."""
    return GatewayError(400, f"{name}: {message}", param=name)


def unavailable(
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: float = 1.0,
) -> GatewayError:
    """The error of what may be asked again later: status 503."""
    return GatewayError(503, message, param=param, code=code, retry_after_s=retry_after_s)


def of_result(error: ErrorInfo | None) -> GatewayError:
    """The error of a request that ended without an answer."""
    if error is None:
        return GatewayError(500, "the request failed")
    if error.code == Code.MODEL_UNAVAILABLE:  # a name that the yard does not have came not so far
        return unavailable(
            error.message, param="model", code=error.code, retry_after_s=LOAD_AGAIN_S
        )
    status = http_status(error.code)
    param, _, rest = error.message.partition(": ")
    is_field = status == 400 and rest and " " not in param
    name = param.removeprefix("params.") if is_field else None
    return GatewayError(status, error.message, param=name, code=error.code)


# Errors as Anthropic's clients expect them, from the gateway and from vLLM's front end.

_MESSAGES: Final = "/v1/messages"
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_UNKNOWN: Final = "the request failed"
_EVENT: Final = b"event: error\n"


def is_of_messages(path: str) -> bool:
    """Whether the clients of a path are Anthropic's."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def _type_of(status: int) -> str:
    """Anthropic's type of an error, by its HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def messages_error(status: int, message: str, request_id: str) -> bytes:
    """The JSON of an error."""
    inner = {"type": _type_of(status), "message": message}
    return as_json({"type": "error", "error": inner, "request_id": request_id})


def messages_event(event: bytes, error: GatewayError | None, request_id: str) -> bytes:
    """An event of a stream, where it is an error in Anthropic's form.

    vLLM's front end calls every error an internal one; ``error`` is what the queue knows of it.
    """
    if not event.startswith(_EVENT):
        return event
    if error is None:
        text = event.partition(b"data: ")[2]
        error = GatewayError(500, message_of(text) or _UNKNOWN)
    return _EVENT + b"data: " + messages_error(error.status, error.message, request_id)


class MessagesAnswer:
    """The `send` of one request of Anthropic's API: names the request, and rewrites its errors."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._request_id = ""
        self._refusal: Message | None = None
        self._text = b""

    async def send(self, message: Message) -> None:
        """Take a message from the gateway."""
        if message["type"] == "http.response.start":
            given = dict(message["headers"]).get(b"x-request-id")
            self._request_id = secrets.token_hex(16) if given is None else given.decode("latin-1")
            named = (b"request-id", self._request_id.encode("latin-1"))
            head = {**message, "headers": [*message["headers"], named]}
            if message["status"] >= 400:
                self._refusal = head
            else:
                await self._send(head)
        elif self._refusal is None:
            await self._send(message)
        else:
            self._text += message.get("body", b"")
            if not message.get("more_body", False):
                await self._refuse(self._refusal)

    async def _refuse(self, head: Message) -> None:
        message = message_of(self._text) or _UNKNOWN
        body = messages_error(head["status"], message, self._request_id)
        kept = [one for one in head["headers"] if one[0] != b"content-length"]
        length = (b"content-length", b"%d" % len(body))
        await self._send({**head, "headers": [*kept, length]})
        await self._send({"type": "http.response.body", "body": body})
