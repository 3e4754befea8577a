"""Submitting requests in bursts, and what the yard answers to each; without I/O."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tokenyard import clock
from tokenyard.broker.outage import Outage
from tokenyard.client.build import PreparedRequest, SubmissionTerms
from tokenyard.client.operations import Ask, Command, Steps
from tokenyard.client.options import Durability
from tokenyard.client.pending import PendingRequest
from tokenyard.client.state import ClientState
from tokenyard.client.window import MapWindow, Numbered
from tokenyard.protocol import errors
from tokenyard.protocol.media import Media
from tokenyard.protocol.packs import in_packs
from tokenyard.protocol.wire import Request, RequestTemplate, template_of
from tokenyard.scripts import client as scripts
from tokenyard.scripts.answers import Acceptance, Submitted
from tokenyard.scripts.calls import command_of
from tokenyard.telemetry import tracing

log = logging.getLogger("tokenyard.client")

#: A burst ends at this many requests or bytes, since the server does nothing else while a script
#: runs.
_MAX_REQUESTS: Final = 256
_MAX_BYTES: Final = 1024 * 1024
#: How long a `map` waits after the broker was unavailable.
_RETRY_AFTER_S: Final = 2.0
#: Longest time until a `map` tries again: an operator may have raised the limit.
_MAX_RETRY_AFTER_S: Final = 30.0
#: Longest wait for a disk or a replica. A server that syncs once a second takes up to a second.
WAIT_S: Final = 5.0
_ACCEPTED: Final = Submitted.ACCEPTED  # enum attribute access is slow; bound once for the hot path

_New = tuple[Request, RequestTemplate, Media, PendingRequest]


@dataclass(slots=True)
class _BurstOutcome:
    """The answer to each request of a burst, by index."""

    submitted: Mapping[int, PendingRequest]
    refused: dict[int, errors.SubmissionError] = field(default_factory=dict)
    #: Why those that are in neither are to come again.
    postponed: errors.SubmissionError | None = None
    not_durable: errors.NotDurable | None = None  # raised although the requests were submitted


@dataclass(slots=True)
class _Load:
    """A burst as it is sent."""

    by_index: dict[int, PendingRequest] = field(default_factory=dict)
    new: list[_New] = field(default_factory=list)
    reused: dict[int, errors.SubmissionError] = field(default_factory=dict)
    fresh: set[PendingRequest] = field(default_factory=set)  # not known to this client before


class Submitter:
    """Submits the requests of one client."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._outage = Outage(log, f"submitting to yard {state.keys.yard}")

    def submit(self, prepared: Sequence[PreparedRequest]) -> Steps[list[PendingRequest]]:
        """Submit any number of requests; stops at the first burst with a refused request.

        Raises `QueueFull`, `QuotaExceeded`, `DeadlineUnmeetable`, `IdReused` or `NotDurable`.
        """
        submitted: list[PendingRequest] = []
        for burst in bursts(enumerate(prepared)):
            outcome = yield from self._submit_burst(burst)
            submitted += outcome.submitted.values()
            for error in (outcome.not_durable, outcome.postponed, *outcome.refused.values()):
                if error is not None:
                    error.accepted = submitted
                    raise error
        return submitted

    def submit_window(self, window: MapWindow) -> Steps[None]:
        """Submit what a `map` has ready."""
        rest = window.take_unsubmitted(clock.monotonic())
        for burst in list(bursts(rest)):
            try:
                outcome = yield from self._submit_burst(burst)
            except errors.BrokerUnavailable as error:
                window.error = error
                self._outage.note(error)
                window.postpone(rest, clock.monotonic() + min(_RETRY_AFTER_S, window.patience_s))
                break
            window.error = None
            self._outage.over()
            for index, pending in outcome.submitted.items():
                window.submitted(index, pending)
            if outcome.not_durable is not None:
                raise outcome.not_durable
            numbered = dict(burst)
            for index, refusal in outcome.refused.items():
                window.reject(index, numbered[index].request.id, refusal)
            done = outcome.submitted.keys() | outcome.refused.keys()
            rest = [one for one in rest if one[0] not in done]
            if outcome.postponed is not None:
                retry_after_s = outcome.postponed.retry_after_s or 0.0
                is_limited = isinstance(outcome.postponed, errors.QuotaExceeded)
                if is_limited and retry_after_s > window.patience_s and not window.running:
                    raise outcome.postponed
                pause_s = min(retry_after_s, _MAX_RETRY_AFTER_S, window.patience_s)
                window.postpone(rest, clock.monotonic() + pause_s)
                break

    def timeout_error(self, window: MapWindow) -> Steps[errors.TokenyardError]:
        """The error for a `map` that has timed out: the broker's, where that is the cause."""
        error = window.error
        if error is None:
            try:
                yield scripts.probe(self._state.keys)
            except errors.BrokerUnavailable as unavailable:
                error = unavailable
            except errors.TokenyardError:
                pass  # this user may not run the probe
        return error or errors.WaitTimeout(f"no result for {self._state.result_timeout_s:g} s")

    def _submit_burst(self, burst: Sequence[Numbered]) -> Steps[_BurstOutcome]:
        """Submit requests of the same terms and tenant in one call."""
        state, now = self._state, clock.monotonic()
        trace = tracing.sending(state.keys.yard)
        load = self._load(burst, trace, now)
        if not load.new:
            return _BurstOutcome(load.by_index, load.reused)
        sent = [pending for *_, pending in load.new]
        terms = burst[0][1].terms
        try:
            acceptances, not_durable = yield from self._send(terms, load.new)
            known = _note_acceptances(sent, acceptances)
            if trace:
                codes = [acceptance.code.name for acceptance in acceptances]
                trace.end(dict(zip([pending.id for pending in sent], codes, strict=True)))
            if terms.cancel_on_disconnect:
                state.lease.attach([pending for pending in sent if pending.is_submitted], now)
            if known:
                yield from state.catch_up(known)
        except errors.TokenyardError as error:
            if trace:
                trace.end({}, error)
            state.router.forget(load.fresh, error)
            for pending in sent:
                pending.is_submitted = pending not in load.fresh
            raise
        outcome = self._sort(load.by_index, dict(zip(sent, acceptances, strict=True)))
        outcome.refused.update(load.reused)
        if not_durable:
            outcome.not_durable = errors.NotDurable(terms.durability, not_durable)
        elif terms.durability != "memory":
            for pending in sent:
                pending.durability = terms.durability
        return outcome

    def _load(self, burst: Sequence[Numbered], trace: tracing.Sending | None, now: float) -> _Load:
        """What of a burst is to be sent: all but what this client has sent before."""
        state, load = self._state, _Load()
        for index, prepared in burst:
            pending = state.router.find(prepared.request.id)
            if pending is None:
                pending = state.router.open(prepared.request.id, prepared.local_text, now)
                pending.digest = prepared.digest
                pending.is_interleaved = prepared.request.params.n > 1
                load.fresh.add(pending)
            elif pending.digest not in ("", prepared.digest):
                load.reused[index] = errors.IdReused(pending.id)
                continue
            elif pending in load.fresh or not _wants_more(prepared, pending):
                load.by_index[index] = pending
                continue
            pending.is_submitted = False
            request, template = prepared.request, prepared.template
            if trace and state.builder.has_room(prepared, tracing.ROOM):
                request = trace.carry(request)
                template = template_of(request)
            load.new.append((request, template, prepared.media, pending))
            load.by_index[index] = pending
        return load

    def _send(
        self, terms: SubmissionTerms, new: Sequence[_New]
    ) -> Steps[tuple[list[Acceptance], str]]:
        """Submit requests on the same terms.

        Returns the answers, and why the requests are not known to be durable ("" if they are).
        """
        state = self._state
        call = scripts.submit(
            state.keys,
            terms.priority_class,
            [request for request, *_ in new],
            watched=state.client_id if terms.cancel_on_disconnect else "",
            refuse_late=terms.refuse_late,
            templates=[template for _, template, _, _ in new],
            digests=[pending.digest for *_, pending in new],
            media=[media for _, _, media, _ in new],
        )
        wait = wait_command(terms.durability)
        if wait is None:
            return (yield call), ""
        # An empty call loads the script, which the pipelined one cannot do.
        yield scripts.submit(state.keys, terms.priority_class, [])
        answer, waited = yield Ask([command_of(call), wait], waits=True)
        return call.read(answer), durability_error(terms.durability, waited)

    def _sort(
        self,
        by_index: Mapping[int, PendingRequest],
        acceptances: Mapping[PendingRequest, Acceptance],
    ) -> _BurstOutcome:
        """Sort the requests of a burst by their answers, and forget those that were refused."""
        if all(pending.is_submitted for pending in acceptances):
            return _BurstOutcome(by_index)
        submitted: dict[int, PendingRequest] = {}
        outcome = _BurstOutcome(submitted)
        for index, pending in by_index.items():
            acceptance = acceptances.get(pending)
            if acceptance is None or pending.is_submitted:
                submitted[index] = pending
                continue
            error = _refusal(pending.id, acceptance)
            self._state.router.forget([pending], error)
            if error.retry_after_s is None:
                outcome.refused[index] = error
            else:
                outcome.postponed = max(
                    outcome.postponed or error, error, key=lambda one: one.retry_after_s or 0.0
                )
        return outcome


def _refusal(request_id: str, acceptance: Acceptance) -> errors.SubmissionError:
    match acceptance.code:
        case Submitted.LATE:
            return errors.DeadlineUnmeetable(acceptance.eta_ms / 1000)
        case Submitted.REUSED:
            return errors.IdReused(request_id)
        case Submitted.QUOTA:
            return errors.QuotaExceeded(acceptance.limit, acceptance.retry_after_s)
        case _:
            return errors.QueueFull(acceptance.retry_after_ms / 1000)


def _wants_more(prepared: PreparedRequest, pending: PendingRequest) -> bool:
    """Whether it is to be somewhere where it is not known to be: its submitter waits again."""
    wanted = prepared.terms.durability
    return wanted not in ("memory", pending.durability) and not pending.is_over


def _note_acceptances(
    requests: Sequence[PendingRequest], acceptances: Sequence[Acceptance]
) -> list[PendingRequest]:
    """Note the answers to a burst; returns the requests that the yard had already."""
    known: list[PendingRequest] = []
    for pending, acceptance in zip(requests, acceptances, strict=True):
        if acceptance.code is _ACCEPTED:
            pending.is_submitted = True
            pending.position = acceptance.position
            pending.eta_s = acceptance.eta_ms / 1000 if acceptance.eta_ms >= 0 else None
        elif acceptance.code is Submitted.KNOWN:
            pending.is_submitted = True
            known.append(pending)
    return known


# WAITAOF and WAIT (Redis and Valkey 7.2 or newer) wait for everything written before on the same
# connection: one wait for a whole burst. Under ``appendfsync everysec`` some servers, including
# Valkey 9.1, answer WAITAOF before they have written (redis#13793), and a client cannot detect
# that: ``disk`` is certain only under ``always``.


def wait_command(durability: Durability) -> Command | None:
    """The command that waits, to be sent after the writes; None for ``memory``."""
    wait_ms = int(1000 * WAIT_S)
    match durability:
        case "disk":
            return ("WAITAOF", 1, 0, wait_ms)
        case "replicated":
            return ("WAIT", 1, wait_ms)
        case _:
            return None


def durability_error(durability: Durability, answer: Any) -> str:
    """Why the writes are not known to be durable, from the answer to `wait_command`; else ""."""
    if isinstance(answer, Exception):
        text = str(answer)
        if "unknown command" in text.lower():
            return (
                "the server has no WAITAOF: that needs Redis 7.2 or Valkey, or appendfsync always"
            )
        return f"the server refuses: {text}"
    count = answer[0] if isinstance(answer, list) else answer
    if count >= 1:
        return ""
    where = "on its disk" if durability == "disk" else "at a replica"
    return f"the server did not have it {where} within {WAIT_S:g} s"


def bursts(numbered: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Group requests, in their order, into bursts that one script call carries."""
    for _, alike in itertools.groupby(numbered, _shared):
        yield from in_packs(alike, _size, _MAX_BYTES, _MAX_REQUESTS)


def _shared(one: Numbered) -> tuple[SubmissionTerms, str]:
    return one[1].terms, one[1].request.tenant


def _size(one: Numbered) -> int:
    size, media = one[1].size, one[1].media
    return size + sum(map(len, media.values())) if media else size  # nearly always there are none


def require_valid(
    prepared: Sequence[PreparedRequest | errors.InvalidRequest],
) -> list[PreparedRequest]:
    """The requests, if all are valid; raises the first error."""
    valid: list[PreparedRequest] = []
    for index, one in enumerate(prepared):
        if isinstance(one, errors.InvalidRequest):
            raise errors.InvalidRequest(f"items[{index}].{one.field}", one.message) from one
        valid.append(one)
    return valid
