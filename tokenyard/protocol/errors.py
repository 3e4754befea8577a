"""Everything that Tokenyard raises, as one tree.

TokenyardError
├── TransientError                trying again helps
│   ├── QueueFull                 the intake is full; ``retry_after_s`` says when to come back
│   ├── NotDurable                accepted, and not known to be as safe as was asked for
│   ├── DeadlineUnmeetable        it would wait beyond its deadline; ``eta_s`` says how long
│   ├── NoCoordinator             nobody leads the yard
│   ├── BrokerUnavailable         Redis does not answer
│   │   ├── BrokerNotWritable     it answers, and takes no writes; ``code`` is Redis' word for why
│   │   └── ScriptsMissing        it has not got the scripts that the leader loads
│   ├── EngineLost                the process of an engine of one's own died; it is loaded again
│   ├── NoFreeDevice              other engines hold the devices
│   └── WaitTimeout               the result is not there yet (also a TimeoutError)
└── PermanentError                trying the same again does not help
    ├── InvalidRequest            the request breaks the protocol; ``field`` says where
    ├── IdReused                  the id is known with another prompt or other parameters
    ├── ProtocolMismatch          the yard speaks another version
    ├── SettingsError             ``faults`` lists everything that is wrong with the settings
    ├── BrokerUnsuitable          this Redis cannot carry a yard
    │   └── NotPermitted          its user has not the right to do that
    ├── StartFailed               the workers of a host cannot start; the message says what to do
    ├── LoadFailed                an engine could not be made; the message is the engine's
    ├── NotStarted                a coordinator or controller did not come up; the reason is its own
    ├── UnknownRequest            the yard never heard of it, or its result has expired
    └── RequestFailed             the request ended without success; ``result`` has it all

Codes on the wire (field ``error.code`` of a result) are the members of `Code`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.protocol.replies import Result


class Code(enum.StrEnum):
    """Why a request did not complete, as it stands on the wire."""

    INVALID_REQUEST = "INVALID_REQUEST"
    QUEUE_FULL = "QUEUE_FULL"
    MODEL_UNAVAILABLE = "MODEL_UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INFERENCE_ERROR = "INFERENCE_ERROR"
    WORKER_LOST = "WORKER_LOST"
    POISONED = "POISONED"
    ID_REUSED = "ID_REUSED"
    ENTRY_LOST = "ENTRY_LOST"


def reused(request_id: str) -> str:
    """Why a request is refused whose id is known with another: code and message."""
    return f"{Code.ID_REUSED}: the id {request_id!r} is known with another request"


class TokenyardError(Exception):
    """Root of the tree."""


class TransientError(TokenyardError):
    """Trying again helps."""


class PermanentError(TokenyardError):
    """Trying the same again does not help."""


class QueueFull(TransientError):
    """The intake holds as many requests as it may.

    ``accepted`` has the handles of those of a burst that were accepted before it was full.
    """

    def __init__(self, retry_after_s: float, accepted: Sequence[Any] = ()) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s
        self.accepted = list(accepted)


class NotDurable(TransientError):
    """Requests were accepted and run, but are not known to be as safe as their submitter asked.

    ``accepted`` has their handles. Who submits them again with the same ids waits again.
    """

    def __init__(self, durability: str, why: str, accepted: Sequence[Any] = ()) -> None:
        super().__init__(f"accepted, but not known to be safe (durability {durability}): {why}")
        self.accepted = list(accepted)


class DeadlineUnmeetable(TransientError):
    """The request was refused, as its submitter asked: it would wait beyond its deadline.

    ``eta_s`` is how long the requests before it are likely to take; ``accepted`` has the handles
    of those of a burst that were accepted before it.
    """

    def __init__(self, eta_s: float, accepted: Sequence[Any] = ()) -> None:
        super().__init__(f"it would wait about {eta_s:g} s, which is beyond its deadline")
        self.eta_s = eta_s
        self.accepted = list(accepted)


class NoCoordinator(TransientError):
    """Nobody leads the yard, so nothing would be dispatched."""


class BrokerUnavailable(TransientError):
    """Redis does not answer."""


class BrokerNotWritable(BrokerUnavailable):
    """Redis answers, and takes no writes: nothing can be submitted, and nobody can lead.

    ``code`` is the first word of what Redis said: ``OOM`` (no memory), ``MISCONF`` (it cannot
    write to its disk), ``READONLY`` (a replica) or ``NOREPLICAS`` (too few replicas follow). The
    message says what to do.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ScriptsMissing(BrokerUnavailable):
    """The server has not got a script, and this user may not load it: the leader does."""

    def __init__(self, script: str) -> None:
        super().__init__(
            f"Redis has not got the script {script!r} of this release, and this user may not load"
            " it. The leader loads those of its own release; for those of another release run"
            " `tokenyard scripts load` of that one as a user who may"
        )


class EngineLost(TransientError):
    """The engine is gone before it has answered: its process died, or somebody let go of it.

    ``results`` has the answers that were there, in the order of the prompts, and None for the rest.
    """

    def __init__(self, message: str, results: Sequence[Result | None] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class NoFreeDevice(TransientError):
    """Other engines hold the devices; the message says which."""


class WaitTimeout(TransientError, TimeoutError):
    """The result is not there yet; the request goes on."""


class InvalidRequest(PermanentError):
    """The request breaks the protocol.

    ``field`` names the offending field as the wire does, for example ``params.temperature``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class IdReused(PermanentError):
    """The id is known with another prompt, model or other parameters: its answer is another's.

    ``accepted`` has the handles of those of a burst that were accepted before it.
    """

    def __init__(self, request_id: str, accepted: Sequence[Any] = ()) -> None:
        super().__init__(
            f"{reused(request_id)}; choose another id, or read the first's answer with attach()"
        )
        self.request_id = request_id
        self.accepted = list(accepted)


class ProtocolMismatch(PermanentError):
    """The yard speaks another version of the protocol."""


class SettingsError(PermanentError):
    """The settings are wrong; every fault is reported at once."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("; ".join(errors))
        self.errors = tuple(errors)


class BrokerUnsuitable(PermanentError):
    """This Redis cannot carry a yard; the message says what to change."""


class NotPermitted(BrokerUnsuitable):
    """The user of this Redis has not the right to do that; the message says which is missing."""


class StartFailed(PermanentError):
    """No worker process of a host can start; the message is a paragraph: how, why, what to do."""


class LoadFailed(PermanentError):
    """An engine could not be made of a model; the message is the engine's own."""


class NotStarted(PermanentError):
    """A coordinator or a controller in a process of one's own did not come up, and says why."""


class UnknownRequest(PermanentError):
    """The yard never heard of this request, or its result has expired."""


class RequestFailed(PermanentError):
    """The request ended as failed, cancelled or expired; ``result`` says how far it came."""

    def __init__(self, result: Result) -> None:
        code, message = (
            (result.error.code, result.error.message) if result.error else (result.status, "")
        )
        super().__init__(f"request {result.id!r}: {code}: {message}")
        self.result = result
        self.code = code
