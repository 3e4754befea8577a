"""The errors of Tokenyard, as one tree.

TokenyardError
├── TransientError                trying again helps
│   ├── QueueFull                 the intake is full; ``retry_after_s`` says when to come back
│   ├── QuotaExceeded             its tenant has reached a limit; ``limit`` names it
│   ├── NotDurable                accepted, but not known to be as durable as requested
│   ├── DeadlineUnmeetable        it would wait beyond its deadline; ``eta_s`` says how long
│   ├── NoCoordinator             no coordinator leads the yard
│   ├── BrokerUnavailable         Redis does not answer
│   │   ├── BrokerNotWritable     it answers, but takes no writes; ``code`` is Redis' reason
│   │   └── ScriptsMissing        it lacks the scripts that coordinators load
│   ├── EngineLost                the process of a local engine died; it is loaded again
│   ├── NoFreeDevice              other engines hold the devices
│   └── WaitTimeout               the result is not there yet (also a TimeoutError)
└── PermanentError                trying the same again does not help
    ├── InvalidRequest            the request breaks the protocol; ``field`` says where
    ├── IdReused                  the id is known with another prompt or other parameters
    ├── ProtocolMismatch          the yard speaks another version
    ├── SettingsError             ``errors`` lists all errors in the settings
    ├── BrokerUnsuitable          this Redis is not suitable for a yard
    │   └── NotPermitted          its user lacks a permission
    ├── StartFailed               the workers of a host cannot start; the message says what to do
    ├── LoadFailed                a model could not be loaded; the message is the engine's
    ├── NotStarted                a coordinator or controller did not start; the reason is its own
    ├── Refused                   an operation is not possible now; nothing has changed
    │   ├── BadInput              a value that a parameter cannot have
    │   └── NotObeyed             workers have not answered in time
    ├── UnknownRequest            the yard does not know it, or its result has expired
    └── RequestFailed             the request did not complete; ``result`` has the details

Those that a submission raises with ``accepted`` are a `SubmissionError`, too.

Codes on the wire (field ``error.code`` of a result) are the members of `Code`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.protocol.replies import Result


class Code(enum.StrEnum):
    """Why a request did not complete, as on the wire."""

    INVALID_REQUEST = "INVALID_REQUEST"
    QUEUE_FULL = "QUEUE_FULL"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    MODEL_UNAVAILABLE = "MODEL_UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INFERENCE_ERROR = "INFERENCE_ERROR"
    WORKER_LOST = "WORKER_LOST"
    POISONED = "POISONED"
    ID_REUSED = "ID_REUSED"
    ENTRY_LOST = "ENTRY_LOST"


#: HTTP status of a failed result, by its code.
_STATUSES: Final[Mapping[str, int]] = {
    Code.INVALID_REQUEST: 400,
    Code.CANCELLED: 409,
    Code.ID_REUSED: 422,
    Code.QUEUE_FULL: 429,
    Code.QUOTA_EXCEEDED: 429,
    Code.MODEL_UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
#: OpenAI's types of errors, by their status.
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    507: "server_error",
}


def http_status(code: str) -> int:
    """HTTP status of a failed result, over HTTP and in the files of batches."""
    return _STATUSES.get(code, 500)


def http_type(status: int) -> str:
    """OpenAI's type of the errors with an HTTP status."""
    return _TYPES.get(status, "invalid_request_error")


def reused(request_id: str) -> str:
    """Code and message for an id that is known with another request."""
    return f"{Code.ID_REUSED}: the id {request_id!r} is known with another request"


class TokenyardError(Exception):
    """Root of the tree."""


class TransientError(TokenyardError):
    """Trying again helps."""


class PermanentError(TokenyardError):
    """Trying the same again does not help."""


class SubmissionError(TokenyardError):
    """A submission has not gone as asked.

    ``accepted`` has the handles of what was accepted. ``retry_after_s`` is None where trying again
    does not help, or the error does not say when.
    """

    retry_after_s: float | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.accepted: list[Any] = []


class QueueFull(TransientError, SubmissionError):
    """The intake is full."""

    retry_after_s: float

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


_WITHIN_LIMIT: Final[Mapping[str, str]] = {
    "models": "name a model that the tenant may use",
    "classes": "use a priority class that the tenant may use",
}


def quota_exceeded(limit: str, retry_after_s: float | None) -> str:
    """The message for a request that a limit of its tenant refuses; None: each time."""
    if retry_after_s is None:
        advice = _WITHIN_LIMIT.get(limit, "ask for fewer tokens")
        return f"{limit}: this limit of its tenant never admits the request; {advice}"
    return f"{limit}: its tenant has reached this limit; try again in {retry_after_s:g} s"


class QuotaExceeded(TransientError, SubmissionError):
    """A limit of the request's tenant refuses it.

    ``limit`` is its name in `TenantSettings`. ``retry_after_s`` is None where trying again does not
    help: the limit never admits such a request.
    """

    def __init__(self, limit: str, retry_after_s: float | None) -> None:
        super().__init__(quota_exceeded(limit, retry_after_s))
        self.limit = limit
        self.retry_after_s = retry_after_s


class NotDurable(TransientError, SubmissionError):
    """Requests were accepted and run, but are not known to be as durable as requested.

    Submitting them again with the same ids waits again.
    """

    def __init__(self, durability: str, why: str) -> None:
        super().__init__(f"accepted, but not known to be safe (durability {durability}): {why}")


class DeadlineUnmeetable(TransientError, SubmissionError):
    """The request would wait beyond its deadline, and was refused, as ``refuse_late`` asks.

    ``eta_s`` is the estimated time of the requests before it.
    """

    def __init__(self, eta_s: float) -> None:
        super().__init__(f"it would wait about {eta_s:g} s, which is beyond its deadline")
        self.eta_s = eta_s


class NoCoordinator(TransientError):
    """No coordinator leads the yard, so no request would be dispatched."""


class BrokerUnavailable(TransientError):
    """Redis does not answer."""


class BrokerNotWritable(BrokerUnavailable):
    """Redis answers, but takes no writes: nothing can be submitted, and no coordinator can lead.

    ``code`` is the first word of Redis' error: ``OOM`` (no memory), ``MISCONF`` (it cannot write to
    its disk), ``READONLY`` (a replica) or ``NOREPLICAS`` (too few replicas). The message says what
    to do.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ScriptsMissing(BrokerUnavailable):
    """The server lacks a script, and this user may not load it: coordinators do."""

    def __init__(self, script: str) -> None:
        super().__init__(
            f"Redis lacks the script {script!r} of this release, and this user may not load it."
            " Coordinators load the scripts of their own release when they start: start one of this"
            " release, which may stand by"
        )


class EngineLost(TransientError):
    """The engine ended before it had answered: its process died, or it was closed.

    ``results`` has the existing answers, in the order of the prompts, and None for the rest.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.results: list[Result | None] = []


class NoFreeDevice(TransientError):
    """Other engines hold the devices; the message says which."""


class WaitTimeout(TransientError, TimeoutError):
    """The result is not there yet; the request continues."""


class InvalidRequest(PermanentError):
    """The request breaks the protocol.

    ``field`` names the offending field as the wire does, for example ``params.temperature``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class IdReused(PermanentError, SubmissionError):
    """The id is known with another prompt, model or other parameters."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"{reused(request_id)}; choose another id, or read the first's answer with attach()"
        )
        self.request_id = request_id


class ProtocolMismatch(PermanentError):
    """The yard speaks another version of the protocol."""


class SettingsError(PermanentError):
    """The settings are invalid; all errors are reported together."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("; ".join(errors))
        self.errors = tuple(errors)


class BrokerUnsuitable(PermanentError):
    """This Redis is not suitable for a yard; the message says what to change."""


class NotPermitted(BrokerUnsuitable):
    """The user of this Redis lacks a permission, which the message names."""


class StartFailed(PermanentError):
    """No worker process of a host can start; the message is a paragraph: how, why, what to do."""


class LoadFailed(PermanentError):
    """A model could not be loaded; the message is the engine's own."""


class NotStarted(PermanentError):
    """An embedded coordinator or controller did not start; the message has its reason."""


class Refused(PermanentError):
    """An operation is not possible now; the message says why and what to do.

    Nothing has changed. ``field`` names the parameter that is wrong, if one is.
    """

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class BadInput(Refused):
    """A value that a parameter cannot have; the message says what to give. Nothing was tried."""


class NotObeyed(Refused):
    """Workers have not answered in time; what was begun is reverted."""


class UnknownRequest(PermanentError):
    """The yard does not know this request, or its result has expired."""


class RequestFailed(PermanentError):
    """The request ended as failed, cancelled or expired; ``result`` has its tokens so far."""

    def __init__(self, result: Result) -> None:
        code, message = (
            (result.error.code, result.error.message) if result.error else (result.status, "")
        )
        super().__init__(f"request {result.id!r}: {code}: {message}")
        self.result = result
        self.code = code
