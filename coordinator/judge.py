"""Whether an intake entry is a request that this yard can run (guarantee G7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from coordinator.history import FRESH, History, Limits, read_history
from coordinator.refusals import refuse
from tokenyard.errors import Code
from tokenyard.keys import IntakeClass
from tokenyard.parse import parse_request
from tokenyard.wire import SYSTEM_FIELDS, Refused, Request, Unanswerable

Verdict = Request | Refused | Unanswerable


class Judge:
    """Judges entries; pure but for the set of models, which the yard's workers determine."""

    def __init__(
        self, *, max_request_bytes: int, limits: Limits, models: Callable[[], AbstractSet[str]]
    ) -> None:
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
        models = self._models()
        if models and not self._is_served(verdict, models):
            message = f"model: {verdict.model or 'none given'}; served: {', '.join(sorted(models))}"
            return refuse(verdict, Code.MODEL_UNAVAILABLE, message)
        problem = self.history(intake, fields).verdict(self._limits, verdict.params.n)
        return verdict if problem is None else refuse(verdict, *problem, is_dead=True)

    def history(self, intake: IntakeClass, fields: Mapping[bytes, bytes]) -> History:
        """What a request has been through.

        Only the system writes retries; in other entries these fields are a client's fancy.
        """
        return read_history(fields) if intake == "retry" else FRESH

    def is_suspect(self, history: History) -> bool:
        """Whether a request must run alone."""
        return history.is_suspect(self._limits)

    def model_of(self, request: Request) -> str:
        """The model that a request means: the one it names, else the yard's only one."""
        models = self._models()
        return request.model or (next(iter(models)) if len(models) == 1 else "")

    def _is_served(self, request: Request, models: AbstractSet[str]) -> bool:
        return self.model_of(request) in models


def _size(intake: IntakeClass, fields: Mapping[bytes, bytes]) -> int:
    """Bytes of a request as its client gave it: what it has grown by since is ours."""
    ours = SYSTEM_FIELDS if intake == "retry" else ()
    return sum(len(name) + len(value) for name, value in fields.items() if name not in ours)
