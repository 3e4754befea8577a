"""Which entries of the intake are requests that this yard can run (guarantee G7)."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from coordinator.dispatch.entries import Entry, Fields
from coordinator.handshake import Models
from coordinator.recovery.history import RetryLimits, began_with, read_history
from coordinator.routing.queued_request import (
    NO_FEATURES,
    NO_TRACE,
    QueuedRequest,
    RoutingFeatures,
    prompt_tokens,
)
from tokenyard.protocol.digest import valid_entry_digest
from tokenyard.protocol.errors import Code, InvalidRequest, quota_exceeded
from tokenyard.protocol.keys import is_tenant, split_intake
from tokenyard.protocol.parse import parse_request, read_params, unfold
from tokenyard.protocol.streams import position
from tokenyard.protocol.texts import did_you_mean
from tokenyard.protocol.wire import (
    SYSTEM_FIELDS,
    Refused,
    Request,
    SamplingParams,
    Unanswerable,
)
from tokenyard.scripts import TransferAnswer

#: What applies where neither a request nor the models file says it.
_USUAL: Final = SamplingParams()

Verdict = QueuedRequest | Refused | Unanswerable


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
        shift_of: Callable[[str, str], int] = lambda *_: 0,
    ) -> None:
        """``shift_of`` an intake and an entry is what to add to its times (`ClockSteps`)."""
        self._max_request_bytes = max_request_bytes
        self._limits = limits
        self._models = models
        self._features_of = features_of
        self._trace_of = trace_of
        self._shift_of = shift_of

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
        # A retry goes on with the model that it began with, even if another is the only one now.
        begun = began_with(fields) if entry.is_retry else ""
        model = self._models.base_of(request.model or begun)
        if not model and self._models.names:
            return self._refuse_model(request)
        _, owner = split_intake(entry.intake)
        if owner and request.tenant != owner:
            message = f"tenant: {request.tenant or 'none'} in the intake of {owner}"
            return refuse(request, Code.INVALID_REQUEST, message)
        trial, not_before_ms, published, digest = None, 0, b"", ""
        if entry.is_retry:  # in other entries these fields come from the client and mean nothing
            history = read_history(fields)
            if failure := history.failure(self._limits, request.params.n):
                return refuse(request, *failure, is_dead=True)
            trial, not_before_ms = history.trial_size(self._limits), history.not_before_ms
            published = entry.published
        else:
            digest = valid_entry_digest(request, fields)
        shift_ms = self._shift_of(entry.intake, entry.id)
        not_before_ms += shift_ms if not_before_ms else 0
        tenant = request.tenant if request.tenant and is_tenant(request.tenant) else ""
        return QueuedRequest(
            intake=entry.intake,
            entry=entry.id,
            id=request.id,
            client=sys.intern(request.client),
            reply_to=sys.intern(request.reply_to),
            result_ttl_s=request.result_ttl_s,
            deadline_ms=None if request.deadline_ms is None else request.deadline_ms + shift_ms,
            is_shifted=shift_ms != 0,
            model=model,
            tokens=prompt_tokens(request, fields),
            # Clients may choose the ids of entries; an id of the future means that it came now.
            since_ms=min(float(position(entry.id)[0]), now_ms),
            not_before_ms=not_before_ms,
            trial=trial,
            published=published,
            trace=self._trace_of(request),
            features=self._features_of(request, fields),
            digest=digest,
            tenant=tenant,
            max_output=self._max_output(request, fields, request.model or begun),
        )

    def _max_output(self, request: Request, fields: Fields, name: str) -> int:
        """Most tokens that a request may generate; what it does not say, the models file may."""
        params, own = request.params, self._models.defaults.get(name or self._models.only)
        if own is not None and (
            (own.max_tokens is not None and params.max_tokens == _USUAL.max_tokens)
            or (own.n is not None and params.n == _USUAL.n)
        ):
            with contextlib.suppress(InvalidRequest):  # they contradict it, which its worker says
                params = read_params(unfold(fields), msgspec.to_builtins(own))
        return params.n * (params.max_tokens or sys.maxsize)

    def _refuse_model(self, request: Request) -> Refused:
        served = self._models.served
        hint = did_you_mean(request.model, served)
        message = f"model: {request.model or 'none given'}; served: {', '.join(served)}{hint}"
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


def refuse_quota(request: Request, answer: TransferAnswer) -> Refused:
    """The refusal of a request that came by XADD, and that a limit of its tenant does not admit.

    It is kept only as long as it holds, so that the same id may come again.
    """
    ttl_s = min(request.result_ttl_s, max(1, math.ceil(answer.retry_after_ms / 1000)))
    if answer.retry_after_s is None:
        ttl_s = request.result_ttl_s
    brief = msgspec.structs.replace(request, result_ttl_s=ttl_s)
    if answer.limit == "max_num_queued_reqs":  # the yard's, not the tenant's
        message = "its tenant has as much of the queue as it leaves to others; try again later"
        return refuse(brief, Code.QUEUE_FULL, message)
    message = quota_exceeded(answer.limit, answer.retry_after_s)
    return refuse(brief, Code.QUOTA_EXCEEDED, message)


def refuse_late(request: Request) -> Refused:
    """The refusal of a request whose deadline passed before it had a lane."""
    message = "the deadline passed while the request was waiting in the intake"
    return refuse(request, Code.DEADLINE_EXCEEDED, message)
