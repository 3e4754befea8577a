"""The timeline of a request, from its ledger: `tokenyard explain`.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from tokenyard.client.ledger import unknown
from tokenyard.protocol.keys import INTAKE_CLASSES, Yard, is_intake, split_intake
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.replies import Provenance, Result, decode_reply, to_result
from tokenyard.protocol.streams import position, unix_ms, whole
from tokenyard.protocol.texts import byte_size, counted
from tokenyard.protocol.wire import Request
from tokenyard.scripts.client import waits_at
from tokenyard.yard.line import NOBODY, TenantLine, read_line, turn
from tokenyard.yard.listing import find_waiting
from tokenyard.yard.pauses import Pause, base_model, pauses_of_model, pauses_of_worker, texts
from tokenyard.yard.reads import Fields, intake_lengths
from tokenyard.yard.requests import TOKEN_BYTES, accepted_ms, tenant_of, text_of_field
from tokenyard.yard.snapshot import YardView, read_yard
from tokenyard.yard.tenants import read_held

#: Entries of intakes to read for a request without a ledger.
_MOST_ENTRIES: Final = 5_000
#: Tenants before that of a request that are listed.
_MOST_BEFORE: Final = 100


class Attempt(Struct, frozen=True, kw_only=True):
    """One assignment to a worker. Times are unix ms by the server's clock."""

    number: int
    worker: str
    why: str  # the coordinator's reason for this worker
    assigned_ms: int
    waited_ms: int  # since acceptance, or since the previous attempt
    given_back_ms: int | None = None  # None: it runs, or ended with the request
    given_back: str = ""  # left, lost, crashed or fault
    reason: str = ""


class Refusal(Struct, frozen=True, kw_only=True):
    """What a worker wrote too late, and the fence refused."""

    at_ms: int
    worker: str
    attempt: int
    what: str  # tokens or result


EventKind = Literal[
    "accepted", "assigned", "given_back", "refused", "waits", "runs", "engine", "ended"
]


class TimelineEvent(Struct, frozen=True):
    """One line of a timeline."""

    at_ms: int
    text: str
    kind: EventKind


class Timeline(Struct, frozen=True, kw_only=True):
    """A request from its acceptance to its result."""

    client: str
    id: str
    state: str  # waiting, assigned, completed, failed, cancelled or expired
    now_ms: int
    server_id: str = ""  # empty: it was cancelled before its arrival
    accepted_ms: int | None = None
    attempts: Sequence[Attempt] = ()
    refusals: int = 0  # by the fence, of which the ledger keeps the last
    last_refusal: Refusal | None = None
    waits_for: str = ""  # why it waits now
    pauses: Sequence[Pause] = ()  # that it waits for
    tenant: str = ""  # whose intake it came from; empty: a common one
    before: Sequence[str] = ()  # while it waits: tenants that are served before its own
    media_bytes: int = 0  # of its pictures and sounds; 0 once there is a result
    tokens_published: int = 0  # as deltas; 0 once there is a result
    ended_ms: int | None = None
    result: Result | None = None

    @property
    def started_ms(self) -> int | None:
        """When the engine started the last attempt; None until there is a result."""
        timing = self.result.timing if self.result else None
        if self.ended_ms is None or timing is None or timing.engine_ms is None:
            return None
        return int(self.ended_ms - timing.engine_ms)

    def events(self) -> list[TimelineEvent]:
        """The timeline in words, in order."""
        return sorted(self._events(), key=lambda event: event.at_ms)

    def _events(self) -> Iterator[TimelineEvent]:
        if self.accepted_ms is not None:
            media = f", with {byte_size(self.media_bytes)} of media" if self.media_bytes else ""
            said = f"accepted as {self.server_id}{media}"
            yield TimelineEvent(self.accepted_ms, said, "accepted")
        for attempt in self.attempts:
            yield from _attempt_events(attempt)
        if self.last_refusal:
            yield self._refused(self.last_refusal)
        if self.state == "waiting":
            yield TimelineEvent(self.now_ms, f"waits: {self.waits_for}", "waits")
        if self.state == "assigned":
            published = f"{self.tokens_published} tokens published so far"
            held = f": {texts(self.pauses, self.now_ms)}" if self.pauses else ""
            said = f"is on the lane of its worker, {published}{held}"
            yield TimelineEvent(self.now_ms, said, "runs")
        yield from self._engine_events()
        if self.ended_ms is not None:
            yield TimelineEvent(self.ended_ms, self._end(), "ended")

    def _engine_events(self) -> Iterator[TimelineEvent]:
        started_ms, timing = self.started_ms, self.result.timing if self.result else None
        if started_ms is None or timing is None:
            return
        yield TimelineEvent(started_ms, "given to the engine", "engine")
        if timing.first_token_ms is not None:
            at_ms = int(started_ms + timing.first_token_ms)
            yield TimelineEvent(at_ms, "first token of this attempt", "engine")

    def _refused(self, last: Refusal) -> TimelineEvent:
        count = f", the last of {self.refusals} refusals" if self.refusals > 1 else ""
        text = f"attempt {last.attempt}: the fence refused {last.what} of {last.worker}{count}"
        return TimelineEvent(last.at_ms, text, "refused")

    def _end(self) -> str:
        result = self.result
        if result is None:
            return self.state
        made = f"{len(result.tokens)} tokens"
        if result.shapes is not None:
            failed = f", of which {len(result.errors)} failed" if result.errors else ""
            made = f"numbers of {counted(len(result.shapes), 'input')}{failed}"
        said = [f"{self.state}: {made}"]
        if result.finish_reason:
            said.append(f"finish reason {result.finish_reason}")
        if result.error:
            said.append(f"{result.error.code}: {result.error.message}")
        if by := result.provenance:
            engine = f"{by.engine} {by.engine_version}".strip()
            said.append(f"by {by.worker} with {by.model} on {engine}{_epochs(by)}")
        return ", ".join(said)


def _epochs(made: Provenance) -> str:
    """The generation epochs of a result, if any is set, after a comma."""
    if made.epoch is None:
        return ""
    began = "" if made.first_epoch is None else f" (begun in {made.first_epoch})"
    return f", epoch {made.epoch}{began}"


def _attempt_events(attempt: Attempt) -> Iterator[TimelineEvent]:
    name = f"attempt {attempt.number}"
    waited = f"after waiting {attempt.waited_ms / 1000:.3f} s"
    said = f"{name}: to {attempt.worker} ({attempt.why}), {waited}"
    yield TimelineEvent(attempt.assigned_ms, said, "assigned")
    if attempt.given_back_ms is not None:
        said = _GIVEN_BACK.get(attempt.given_back, attempt.given_back)
        reason = f": {attempt.reason}" if attempt.reason else ""
        yield TimelineEvent(attempt.given_back_ms, f"{name}: {said}{reason}", "given_back")


_GIVEN_BACK: Final = {
    "left": "its worker stopped and handed it back",
    "lost": "its worker was lost",
    "crashed": "its worker crashed",
    "fault": "its engine could not serve it",
}


def read_timeline(yard: Yard, client: str, request_id: str) -> Timeline:
    """Read the timeline of a request; raises `UnknownRequest`."""
    pipeline = yard.connection.pipeline(transaction=False)
    pipeline.hgetall(yard.keys.ledger(client, request_id))
    pipeline.strlen(yard.keys.tokens(client, request_id))
    pipeline.strlen(yard.keys.media(client, request_id))
    pipeline.time()
    fields, published, media_bytes, time = pipeline.execute()
    ledger: Fields = fields or _ledger_of_plain_entry(yard, client, request_id)
    now_ms = unix_ms(time)
    state, sid = text_of_field(ledger, b"state"), text_of_field(ledger, b"sid")
    packed = ledger.get(b"result")
    line = read_line(yard) if state == "waiting" else NOBODY
    waits_for, pauses = _waits_for(yard, ledger, line, now_ms)
    tenant = tenant_of(sid)
    return Timeline(
        client=client,
        id=request_id,
        state=state,
        now_ms=now_ms,
        server_id=sid,
        accepted_ms=accepted_ms(sid) or None,
        attempts=_attempts(ledger, sid),
        refusals=_number(ledger, b"refusals") or 0,
        last_refusal=_refusal(ledger),
        waits_for=waits_for,
        pauses=pauses,
        tenant=tenant,
        before=line.before(tenant)[:_MOST_BEFORE] if tenant else (),
        media_bytes=media_bytes,
        tokens_published=published // TOKEN_BYTES,
        ended_ms=_number(ledger, b"ended"),
        result=to_result(decode_reply(packed)) if packed else None,
    )


def read_attempts(yard: Yard, client: str, request_id: str, server_id: str) -> list[Attempt]:
    """The attempts of a request; none if its ledger is gone or of another life of its id."""
    ledger: Any = yard.connection.hgetall(yard.keys.ledger(client, request_id))
    if text_of_field(ledger, b"sid") != server_id:
        return []
    return _attempts(ledger, server_id)


def _attempts(ledger: Fields, server_id: str) -> list[Attempt]:
    """The attempts, from the fields t<attempt> (assigned) and r<attempt> (given back)."""
    found: list[Attempt] = []
    since_ms = accepted_ms(server_id) or None
    numbers = {whole(name[1:]) for name in ledger if name.startswith(b"t")}
    for number in sorted(number for number in numbers if b"t%d" % number in ledger):
        entry, worker, why = _words(ledger, b"t%d" % number, 3)
        back, _, given_back, reason = _words(ledger, b"r%d" % number, 4)
        assigned_ms = position(entry)[0]
        found.append(
            Attempt(
                number=number,
                worker=worker,
                why=why,
                assigned_ms=assigned_ms,
                waited_ms=max(0, assigned_ms - (assigned_ms if since_ms is None else since_ms)),
                given_back_ms=whole(back) if back.isdigit() else None,
                given_back=given_back,
                reason=reason,
            )
        )
        since_ms = found[-1].given_back_ms
    return found


def _refusal(ledger: Fields) -> Refusal | None:
    at, worker, attempt, what = _words(ledger, b"refused", 4)
    if not (at.isdigit() and attempt.isdigit()):
        return None
    return Refusal(at_ms=whole(at), worker=worker, attempt=whole(attempt), what=what)


def _ledger_of_plain_entry(yard: Yard, client: str, request_id: str) -> Fields:
    """The ledger that a request by plain XADD will have; raises `UnknownRequest`."""
    waiting = find_waiting(
        yard, lambda one: (one.client, one.id) == (client, request_id), _MOST_ENTRIES
    )
    for one in waiting:
        return {b"state": b"waiting", b"sid": one.server_id.encode()}
    raise unknown(request_id)


def _waits_for(
    yard: Yard, ledger: Fields, line: TenantLine, now_ms: int
) -> tuple[str, list[Pause]]:
    """Why a request waits, in words, and the pauses that it waits for."""
    state = text_of_field(ledger, b"state")
    if state not in {"waiting", "assigned"}:
        return "", []
    view = read_yard(yard, counts_lanes=False)
    if state == "assigned":
        return "", pauses_of_worker(view, text_of_field(ledger, b"worker"))
    model = _model(yard, ledger)
    pauses = pauses_of_model(view, model)
    if view.leader and pauses:
        return texts(pauses, now_ms), pauses
    if reason := _waits_in(view, ledger, model, now_ms):
        return reason, pauses
    return _in_turn(yard, line, _place(ledger)[0]), pauses


def _waits_in(view: YardView, ledger: Fields, model: str, now_ms: int) -> str:
    """Why a request cannot be served now although no pause holds it; "" where it could be."""
    not_before_ms = _number(ledger, b"not_before") or 0
    reason = text_of_field(ledger, b"reason")
    if view.leader is None and view.broker_error:
        return f"no coordinator can lead: the broker {view.broker_error}"
    if view.leader is None:
        return "no coordinator leads the yard: start one"
    if not_before_ms > now_ms:
        pause_s = (not_before_ms - now_ms) / 1000
        return f"it is tried again in {pause_s:.1f} s, after: {reason}"
    if not view.ready_workers:
        return "no worker is ready"
    if model and base_model(view, model) not in view.models:
        return f"no worker with model {model} is ready"
    trial = _number(ledger, b"trial")
    if trial == 0:
        return f"it must run alone, on an empty lane, after: {reason}"
    if trial is not None:
        return f"it waits for its trial among at most {trial} suspects, after: {reason}"
    return ""


def _in_turn(yard: Yard, line: TenantLine, intake: str) -> str:
    """Where a request stands that could be served now."""
    tenant = split_intake(intake)[1]
    if tenant:
        return turn(line, intake, read_held(yard, tenant))
    served = list(itertools.takewhile(lambda name: name != intake, INTAKE_CLASSES))
    *before, here = intake_lengths(yard, [*served, intake])
    text = f"intake {intake} holds {counted(here, 'request')}, the intakes before it {sum(before)}"
    others = sum(bool(one.name) for one in line.tenants)
    return (
        f"{text}; requests of no tenant share with {counted(others, 'tenant')}" if others else text
    )


def _model(yard: Yard, ledger: Fields) -> str:
    """Its model; empty for the yard's only one."""
    intake, entry = _place(ledger)
    if not is_intake(intake):
        return ""
    found: Any = yard.connection.xrange(yard.keys.intake(intake), entry, entry)
    request = parse_request(found[0][1]) if found else None
    return request.model if isinstance(request, Request) else ""


def _place(ledger: Fields) -> tuple[str, str]:
    return waits_at(*(text_of_field(ledger, name) for name in (b"sid", b"intake", b"entry")))


def _words(ledger: Fields, name: bytes, count: int) -> list[str]:
    """A field split into ``count`` words; the last is the rest."""
    words = text_of_field(ledger, name).split(" ", count - 1)
    return words + [""] * (count - len(words))


def _number(ledger: Fields, name: bytes) -> int | None:
    raw = ledger.get(name, b"")
    return whole(raw) if raw.isdigit() else None
