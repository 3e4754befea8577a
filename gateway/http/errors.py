"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from tokenyard.protocol.errors import Code, http_status, http_type
from tokenyard.protocol.replies import ErrorInfo

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
        """The JSON of the answer; `anthropic` gives it the other form."""
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
