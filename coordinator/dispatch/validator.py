"""Whether an intake entry is a request that this yard can run (guarantee G7)."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.dispatch.models import Models
from coordinator.dispatch.refusals import refuse
from coordinator.history import FRESH, History, RetryLimits, read_history
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.texts import did_you_mean
from tokenyard.protocol.wire import SYSTEM_FIELDS, Refused, Request, Unanswerable

Verdict = Request | Refused | Unanswerable


class RequestValidator:
    """Judges entries; pure but for the models, which the yard's workers and hosts determine."""

    def __init__(self, *, max_request_bytes: int, limits: RetryLimits, models: Models) -> None:
        self._max_request_bytes = max_request_bytes
        self._limits = limits
        self._models = models

    def judge(self, intake: IntakeClass, fields: Mapping[bytes, bytes]) -> Verdict:
        """The request in an entry, or why it is not run."""
        verdict = parse_request(fields)
        if not isinstance(verdict, Request):
            return verdict
        size = _size(intake, fields)
        if size > self._max_request_bytes:
            message = f"request: {size} bytes, more than {self._max_request_bytes}"
            return refuse(verdict, Code.INVALID_REQUEST, message)
        if not self.model_of(verdict) and self._models.names:
            served = ", ".join(self._models.names)
            hint = did_you_mean(verdict.model, self._models.names)
            message = f"model: {verdict.model or 'none given'}; served: {served}{hint}"
            return refuse(verdict, Code.MODEL_UNAVAILABLE, message)
        if intake != "retry":  # it has been through nothing
            return verdict
        problem = self.history(intake, fields).verdict(self._limits, verdict.params.n)
        return verdict if problem is None else refuse(verdict, *problem, is_dead=True)

    def history(self, intake: IntakeClass, fields: Mapping[bytes, bytes]) -> History:
        """What a request has been through.

        Only the system writes retries; in other entries these fields are a client's fancy.
        """
        return read_history(fields) if intake == "retry" else FRESH

    def trial_size(self, history: History) -> int | None:
        """With how many suspects a request may run; see `History.trial_size`."""
        return history.trial_size(self._limits)

    def model_of(self, request: Request) -> str:
        """The base model that serves a request; "" where the yard does not know it."""
        return self._models.base_of(request.model)


def _size(intake: IntakeClass, fields: Mapping[bytes, bytes]) -> int:
    """Bytes of a request as its client gave it: what it has grown by since is ours."""
    size = sum(map(len, fields)) + sum(map(len, fields.values()))
    if intake == "retry":
        ours = SYSTEM_FIELDS & fields.keys()
        size -= sum(len(name) + len(fields[name]) for name in ours)
    return size
