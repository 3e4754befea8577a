"""Which entries of the intake are requests that this yard can run (guarantee G7).

A retry brings its history. A crash says something about the requests that were running; a kill from
outside does not. Each request that may have caused a crash is a suspect, and is tried with ever
fewer others (`coordinator.routing.suspicion`), at last alone. Only a request that kills its worker
while it runs alone is given up, so its neighbours complete; and only the second time, since the
first crash may have had another cause.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator.dispatch.intake import Entry, Fields
from coordinator.handshake import Models
from coordinator.routing.features import NO_FEATURES, RoutingFeatures
from coordinator.routing.queued_request import NO_TRACE, QueuedRequest, prompt_tokens
from tokenyard.protocol.errors import Code
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.streams import position
from tokenyard.protocol.wire import SYSTEM_FIELDS, Refused, Request, Unanswerable
from tokenyard.protocol.wording import counted, did_you_mean

Verdict = QueuedRequest | Refused | Unanswerable


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How often is too often."""

    max_crashes: int  # workers lost with it for any reason before it must run alone
    max_crashed_alone: int  # workers that crashed while it ran alone
    max_lost_alone: int  # workers killed from outside while it ran alone
    max_faults: int  # times that an engine could not serve it


class Admission:
    """Decides about one entry at a time; pure but for the models that the yard knows."""

    def __init__(
        self,
        *,
        max_request_bytes: int,
        limits: RetryLimits,
        models: Models,
        features_of: Callable[[Request, Fields], RoutingFeatures] = lambda *_: NO_FEATURES,
        trace_of: Callable[[Request], Mapping[str, str]] = lambda _: NO_TRACE,
    ) -> None:
        self._max_request_bytes = max_request_bytes
        self._limits = limits
        self._models = models
        self._features_of = features_of
        self._trace_of = trace_of

    def admit(self, entry: Entry, now_ms: float) -> Verdict:
        """The request of an entry, ready to wait for a lane; or why it is not run."""
        fields = entry.fields
        request = parse_request(fields)
        if not isinstance(request, Request):
            return request
        size = _size(entry)
        if size > self._max_request_bytes:
            message = f"request: {size} bytes, more than {self._max_request_bytes}"
            return refuse(request, Code.INVALID_REQUEST, message)
        model = self._models.base_of(request.model)
        if not model and self._models.names:
            return self._refuse_model(request)
        trial, not_before_ms = None, 0
        if entry.is_retry:  # in other entries these fields come from the client and mean nothing
            history = read_history(fields)
            if failure := history.failure(self._limits, request.params.n):
                return refuse(request, *failure, is_dead=True)
            trial, not_before_ms = history.trial_size(self._limits), history.not_before_ms
        return QueuedRequest(
            intake=entry.intake,
            entry=entry.id,
            id=request.id,
            client=sys.intern(request.client),
            reply_to=sys.intern(request.reply_to),
            result_ttl_s=request.result_ttl_s,
            deadline_ms=request.deadline_ms,
            model=model,
            tokens=prompt_tokens(request, fields),
            # Clients may choose the ids of entries; an id of the future means that it came now.
            since_ms=min(float(position(entry.id)[0]), now_ms),
            not_before_ms=not_before_ms,
            trial=trial,
            published=entry.published,
            trace=self._trace_of(request),
            features=self._features_of(request, fields),
            digest=entry.digest,
        )

    def _refuse_model(self, request: Request) -> Refused:
        names = self._models.names
        hint = did_you_mean(request.model, names)
        message = f"model: {request.model or 'none given'}; served: {', '.join(names)}{hint}"
        return refuse(request, Code.MODEL_UNAVAILABLE, message)


def _size(entry: Entry) -> int:
    """Bytes of a request as its client gave it, without the fields that the system added."""
    fields = entry.fields
    size = sum(map(len, fields)) + sum(map(len, fields.values()))
    if entry.is_retry:
        added = SYSTEM_FIELDS & fields.keys()
        size -= sum(len(name) + len(fields[name]) for name in added)
    return size


def refuse(request: Request, code: Code, message: str, *, is_dead: bool = False) -> Refused:
    """The refusal of a request; with ``is_dead`` it also becomes a dead letter."""
    return Refused(
        request.id,
        request.client,
        request.reply_to,
        code,
        message,
        request.result_ttl_s,
        is_dead=is_dead,
    )


def refuse_late(request: Request) -> Refused:
    """The refusal of a request whose deadline passed before it had a lane."""
    message = "the deadline passed while the request was waiting in the intake"
    return refuse(request, Code.DEADLINE_EXCEEDED, message)


@dataclass(frozen=True, slots=True)
class History:
    """The fields of a retry that only the system writes.

    ``trial`` is the most suspects in its next trial, itself included; 0: it must run alone;
    None: it is no suspect.
    """

    crashes: int = 0
    suspected: int = 0
    crashed_alone: int = 0
    lost_alone: int = 0
    faults: int = 0
    not_before_ms: int = 0
    reason: str = ""
    published: int = 0  # tokens that its readers have seen
    choices: int = 0  # of how many of them the choice is known, where there are several choices
    trial: int | None = None

    def trial_size(self, limits: RetryLimits) -> int | None:
        """The most suspects it may run with, itself included; 0: alone; None: it is no suspect.

        A request that was lost too often with workers killed from outside must run alone as well.
        """
        if self.crashes - self.suspected >= limits.max_crashes:
            return 0
        return self.trial

    def failure(self, limits: RetryLimits, choices: int) -> tuple[Code, str] | None:
        """Why it is given up; None while it may run again."""
        if self.crashed_alone >= limits.max_crashed_alone:
            times = f"{counted(self.crashed_alone, 'worker')} crashed while it ran alone"
            return Code.POISONED, f"{times}, the last: {self.reason}"
        if self.lost_alone >= limits.max_lost_alone:
            were = "was" if self.lost_alone == 1 else "were"
            times = f"{counted(self.lost_alone, 'worker')} {were} lost while it ran alone"
            return Code.POISONED, f"{times}, the last: {self.reason}"
        if self.faults >= limits.max_faults:
            return Code.INFERENCE_ERROR, f"failed {self.faults} times, at last: {self.reason}"
        if choices > 1 and self.choices != self.published:
            return Code.WORKER_LOST, "which choice its published tokens belong to was lost"
        return None


def read_history(fields: Mapping[bytes, bytes]) -> History:
    """The history in a retry's fields; values that are not numbers count as 0."""
    return History(
        crashes=_count(fields, b"crashes"),
        suspected=_count(fields, b"suspected"),
        crashed_alone=_count(fields, b"crashed_alone"),
        lost_alone=_count(fields, b"lost_alone"),
        faults=_count(fields, b"faults"),
        not_before_ms=_count(fields, b"not_before"),
        reason=fields.get(b"reason", b"").decode(errors="replace"),
        published=len(fields.get(b"published", b"")) // 4,
        choices=len(fields.get(b"choices", b"")),
        trial=_count(fields, b"trial") if b"trial" in fields else None,
    )


def _count(fields: Mapping[bytes, bytes], name: bytes) -> int:
    raw = fields.get(name, b"")
    return int(raw) if raw.isdigit() and len(raw) < 16 else 0
