"""Which entries of the intake are requests that this yard can run (guarantee G7).

Of a retry also what it has been through: a crash says something about the requests that were
running; a kill from outside does not. Each request that may have caused a crash is a suspect, and
is tried with ever fewer others (`coordinator.routing.suspicion`), at last alone. Only a request
that kills its worker while it runs alone is given up, so its neighbours complete; and only the
second time, since the first crash may have had another cause.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from coordinator.dispatch.entries import Entry, Fields
from coordinator.handshake import Models
from coordinator.routing.queued_request import (
    NO_FEATURES,
    NO_TRACE,
    QueuedRequest,
    RoutingFeatures,
    prompt_tokens,
)
from tokenyard.protocol.digest import entry_recipe
from tokenyard.protocol.errors import Code, quota_exceeded
from tokenyard.protocol.keys import is_tenant, split_intake
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.streams import digits, position
from tokenyard.protocol.texts import counted, did_you_mean
from tokenyard.protocol.wire import Refused, Request, SamplingParams, Unanswerable
from tokenyard.protocol.worker_info import OutputDefaults
from tokenyard.scripts.answers import TransferAnswer

#: What applies where neither a request nor the models file says it.
_USUAL: Final = SamplingParams()

Verdict = QueuedRequest | Refused | Unanswerable


class Admission:
    """Decides about one entry at a time; pure but for the models that the yard knows."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        models: Models,
        *,
        features_of: Callable[[Request, Fields], RoutingFeatures] = lambda *_: NO_FEATURES,
        trace_of: Callable[[Request], Mapping[str, str]] = lambda _: NO_TRACE,
        shift_of: Callable[[str, str], int] = lambda *_: 0,
    ) -> None:
        """``shift_of`` an intake and an entry is what to add to its times (`ClockSteps`)."""
        self._settings = settings
        self._takes_turns = not settings.deterministic
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
        recipe, tokens = entry_recipe(fields), prompt_tokens(request, fields)
        history = read_history(fields) if entry.is_retry else None
        # A retry goes on with the model that it began with, even if another is the only one now.
        name = request.model or (history.base_model if history else "")
        model = self._models.base_of(name)
        if refused := self._refusal(entry, request, model, history):
            return refused
        shift_ms = self._shift_of(entry.intake, entry.id)
        trial, not_before_ms, published, digest = None, 0, b"", ""
        if history:  # in other entries these fields come from the client and mean nothing
            trial, published = history.trial_size(self._settings), entry.published
            not_before_ms = history.not_before_ms + shift_ms if history.not_before_ms else 0
        else:
            digest = recipe.digest_of(request)
        own = self._models.defaults.get(name or self._models.only)
        client = sys.intern(request.client)
        return QueuedRequest(
            intake=entry.intake,
            entry=entry.id,
            id=request.id,
            client=client,
            turn=client if self._takes_turns else "",
            reply_to=sys.intern(request.reply_to),
            result_ttl_s=request.result_ttl_s,
            deadline_ms=None if request.deadline_ms is None else request.deadline_ms + shift_ms,
            is_shifted=shift_ms != 0,
            model=model,
            tokens=tokens,
            # Clients may choose the ids of entries; an id of the future means that it came now.
            since_ms=min(position(entry.id)[0], now_ms),
            not_before_ms=not_before_ms,
            trial=trial,
            published=published,
            trace=self._trace_of(request),
            features=self._features_of(request, fields),
            digest=digest,
            tenant=request.tenant if request.tenant and is_tenant(request.tenant) else "",
            max_output=0 if request.pools else most_output(request.params, recipe.stated, own),
        )

    def _refusal(
        self, entry: Entry, request: Request, model: str, history: History | None
    ) -> Refused | None:
        """Why a request that can be read is not run."""
        if entry.size > self._settings.max_request_bytes:
            message = f"request: {entry.size} bytes, more than {self._settings.max_request_bytes}"
            return refuse(request, Code.INVALID_REQUEST, message)
        if not model and self._models.names:
            served = self._models.served
            hint = did_you_mean(request.model, served)
            message = f"model: {request.model or 'none given'}; served: {', '.join(served)}{hint}"
            return refuse(request, Code.MODEL_UNAVAILABLE, message)
        _, owner = split_intake(entry.intake)
        if owner and owner != request.tenant:
            message = f"tenant: {request.tenant or 'none'} in the intake of {owner}"
            return refuse(request, Code.INVALID_REQUEST, message)
        if history and (failure := history.failure(self._settings, request.params.n)):
            return refuse(request, *failure, is_dead=True)
        return None


def most_output(params: SamplingParams, stated: Collection[str], own: OutputDefaults | None) -> int:
    """Most tokens that a request may generate; ``own`` are its model's values for what it omits.

    ``stated`` names the parameters that it gives although they have the wire's default.
    """
    n, max_tokens = params.n, params.max_tokens
    if own is not None:
        if own.n and n == _USUAL.n and "n" not in stated:
            n = own.n
        if own.max_tokens and max_tokens == _USUAL.max_tokens and "max_tokens" not in stated:
            max_tokens = own.max_tokens
        if max_tokens is not None and max_tokens < params.min_tokens:
            n, max_tokens = params.n, params.max_tokens  # its worker says that they contradict it
    return n * (max_tokens or sys.maxsize)


def refuse(
    request: Request | QueuedRequest, code: Code, message: str, *, is_dead: bool = False
) -> Refused:
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


def refuse_quota(request: QueuedRequest, answer: TransferAnswer) -> Refused:
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


def refuse_late(request: Request | QueuedRequest) -> Refused:
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
    base_model: str = ""  # of the worker that it was taken back from; "" where it is not known

    def trial_size(self, limits: CoordinatorSettings) -> int | None:
        """The most suspects it may run with, itself included; 0: alone; None: it is no suspect.

        A request that was lost too often with workers killed from outside must run alone as well.
        """
        if self.crashes - self.suspected >= limits.max_crashes:
            return 0
        return self.trial

    def failure(self, limits: CoordinatorSettings, choices: int) -> tuple[Code, str] | None:
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
        base_model=fields.get(b"base_model", b"").decode(errors="replace"),
    )


def _count(fields: Mapping[bytes, bytes], name: bytes) -> int:
    return digits(fields.get(name), 15) or 0
