"""What can be done with requests: cancel or requeue one, several, or all that a filter finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final, TypedDict, TypeVar, Unpack

from redis.exceptions import NoPermissionError

from tokenyard import clock
from tokenyard.client.sync import Client as YardClient
from tokenyard.ops.letters import requeue_letters
from tokenyard.ops.names import named_request
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.protocol.errors import BadInput, Refused
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import unix_ms
from tokenyard.protocol.texts import counted, listed, printable
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Cancelled
from tokenyard.yard.letters import DeadLetter, LetterFilter, all_heads, find_letter
from tokenyard.yard.listing import Filter, Query, list_requests, read_filter
from tokenyard.yard.reads import Owned
from tokenyard.yard.requests import IN_FLIGHT, Listed, accepted_ms, by_ledger

T = TypeVar("T")

#: Most requests of one operation.
MOST: Final = 1_000
#: Most entries of intakes to read for all that match, and as many of lanes; most keys to look at.
MOST_ENTRIES: Final = 20_000
MOST_KEYS: Final = 100_000
#: Requests that a preview names.
_MOST_NAMED: Final = 10
#: A search of dead letters ends after so long.
_SEARCH_S: Final = 10.0
_UNREAD: Final = "There may be more: not all dead letters were read. Narrow the filter"
_UNSEEN: Final = (
    "There may be more: only {:,} waiting requests, as many on lanes, and the queues of {:,}"
    " tenants were read. Narrow the filter, or do it again"
)
_MORE: Final = "More than {:,} match: these are the first; do it again for the rest"
_NOTHING: Final = "There is no such request any more"


class RequestSelection(TypedDict, total=False):
    """The requests that are meant: some that are named, or all that a filter finds."""

    request: Annotated[tuple[str, ...], Field(noun="request")]
    all: Annotated[bool, Field(hint="All that the filter finds.")]
    id: Annotated[str, Field(is_hidden=True)]
    client: Annotated[
        str, Field(hint="Client of the requests.  [default: anon, else the only one with the id]")
    ]
    tenant: Annotated[str, Field(hint="With --all: only those of this tenant.", noun="tenant")]
    model: Annotated[str, Field(hint="With --all: only those for this model.", noun="model")]
    worker: Annotated[str, Field(hint="With --all: only those of this worker.", noun="worker")]
    error: Annotated[str, Field(hint="With --all: only those whose error has this text.")]
    older: Annotated[str, Field(hint="With --all: only those of at least this age, as 5m.")]
    newer: Annotated[str, Field(hint="With --all: only those of at most this age.")]
    state: Annotated[list[str] | None, Field(hint="With --all: only those in these states.")]
    order: Annotated[str, Field(is_hidden=True)]
    until: Annotated[int, Field(is_hidden=True)]  # when it was asked for, in unix ms


#: The requests to cancel, or the letters of those to requeue; what they are in words, for the
#: audit; and what is not possible, or was not reached, and what to do.
_Chosen = tuple[Sequence[T], str, Sequence[str]]


def _preview_cancel(yard: Yard, _caller: Caller, **given: Unpack[RequestSelection]) -> Preview:
    found, _, left = _chosen(yard, given)
    running = _running(found)
    over = len(found) - len(running)
    notes = _sentences([*([_have_ended(over)] if over else []), *left])
    if not running:
        return Preview(f"There is nothing to cancel.{notes}", count=0)
    states = Counter(one.state for one in running)
    which = " and ".join(f"{states[state]:,} {state}" for state in sorted(states))
    they = "It ends" if len(running) == 1 else "They end"
    return Preview(
        f"Cancel {counted(len(running), 'request')} ({which})? {they} as cancelled,"
        f" with the tokens published so far; workers stop at once.{notes}",
        [f"{_name(one.client, one.id)}, {one.state}" for one in running[:_MOST_NAMED]],
        len(running),
        needs_yes=bool(given.get("all")),
    )


@operation("request.cancel", "Cancel requests", _preview_cancel, is_dangerous=True)
def cancel(yard: Yard, caller: Caller, **given: Unpack[RequestSelection]) -> Outcome:
    """Cancel requests, whether they wait or run.

    A request gets its result, `cancelled`, immediately, with the tokens published so far, and its
    worker stops it. A request that has ended keeps its result. An unknown id is cancelled before
    its arrival: it gets the result `cancelled`, and the request does not run if it arrives later.

    Without --client, the client is `anon` if it has the id, else the only one that has; an unknown
    id is cancelled for `anon`. Nothing is cancelled before all clients are found.

    Examples:
      tokenyard cancel 6b1b2c9e-1
      tokenyard cancel q1 q2 --client ann --why "wrong prompts"
      tokenyard cancel --all --model adder --older 1h
    """
    found, words, left = _chosen(yard, given)
    by = "cancelled by an operator"
    reason = f"{by}: {caller.why}" if caller.why else by
    ends = [(one, _cancel(yard, one, reason)) for one in _running(found)]
    codes = Counter(code for _, code in ends)
    unknown, moved = codes[Cancelled.CANCELLED_BEFORE_ARRIVAL], codes[Cancelled.MOVED]
    done = codes[Cancelled.CANCELLED] + unknown
    over = len(found) - done - moved
    if not done and not moved:
        raise Refused(f"Nothing was cancelled. {_have_ended(over)}" if over else _NOTHING)
    notes = [f"{unknown:,} of them had not been looked at yet: they do not run"] if unknown else []
    notes += [_have_ended(over)] if over else []
    notes += [f"{moved:,} moved all the time: cancel again"] if moved else []
    return Outcome(
        f"{counted(done, 'request')} cancelled",
        words,
        notes=[*notes, *left],
        fields={
            "cancelled": done,
            "before_arrival": unknown,
            "ended": over,
            "moved": moved,
            "requests": [
                {"client": one.client, "id": one.id, "cancel": code.name.lower()}
                for one, code in ends
            ],
        },
        is_partial=bool(over or moved),
    )


def _cancel(yard: Yard, one: Listed, reason: str) -> Cancelled:
    """Cancel a request wherever it is now; whoever has no right to it asks the leader."""
    try:
        return Scripts(yard).cancel(one.client, one.id, reason)
    except NoPermissionError:
        client = YardClient(yard.url, yard.keys.yard, one.client)
        try:  # not `with`, which needs a coordinator
            return Cancelled[client.cancel(one.id).name]
        finally:
            client.close()


def _preview_requeue(yard: Yard, _caller: Caller, **given: Unpack[RequestSelection]) -> Preview:
    found, _, left = _letters(yard, given)
    count, notes = len(found), _sentences(left)
    if not count:
        return Preview(f"There is nothing to requeue.{notes}", count=0)
    what = "it keeps its id" if count == 1 else "they keep their ids"
    return Preview(
        f"Submit {counted(count, 'failed request')} again? New results replace the failed ones;"
        f" {what}.{notes}",
        [_name(one.client, one.id) for one in found[:_MOST_NAMED]],
        count,
    )


@operation("request.requeue", "Requeue requests", _preview_requeue)
def requeue(yard: Yard, _caller: Caller, **given: Unpack[RequestSelection]) -> Outcome:
    """Submit failed requests again.

    They are taken from the dead letters and keep their ids; new results replace the failed ones.
    `tokenyard dead requeue` does the same by the names of the letters. A failed request without a
    dead letter was not kept: its input was invalid, or its engine refused it.

    Without --client, the client is `anon` if it has the id, else the only one that has.

    Examples:
      tokenyard requeue q7 --client ann
      tokenyard requeue --all
      tokenyard requeue --all --client ann --error INFERENCE_ERROR
    """
    found, words, left = _letters(yard, given)
    problems = Counter(requeue_letters(yard, found).values())
    done = problems.pop("", 0)
    notes = [*_told(problems), *left]
    if not done and (given.get("request") or notes):
        raise Refused(f"Nothing was requeued.{_sentences(notes)}" if notes else _NOTHING)
    waits = "waits" if done == 1 else "wait"
    return Outcome(
        f"{counted(done, 'request')} {waits} again",
        words,
        notes=notes,
        fields={"requeued": done, "notes": notes},
        is_partial=bool(notes),
    )


def _running(requests: Iterable[Listed]) -> list[Listed]:
    """Those that have no result yet."""
    return [one for one in requests if not one.is_ended]


def _chosen(yard: Yard, given: RequestSelection) -> _Chosen[Listed]:
    """Those that are named, or all in flight that match the filter."""
    wanted = _wanted(given)
    if wanted is None:
        owners, words = _selected(given)
        known = {(one.client, one.id): one for one in by_ledger(yard, owners)}
        # A request by plain XADD has no ledger while it waits.
        requests = [
            known.get(one) or Listed(client=one[0], id=one[1], state="waiting") for one in owners
        ]
        return requests, words, ()
    if not wanted.wanted_states & IN_FLIGHT:
        return (), wanted.words(), ()
    query = wanted.query(
        limit=MOST,
        most=MOST_ENTRIES,
        most_keys=MOST_KEYS,
        most_streams=MOST,
        states=IN_FLIGHT,
        until_ms=given.get("until", 0),
    )
    found = list_requests(yard, query)
    notes = []
    if found.has_more:
        notes = [_MORE.format(MOST)]
    elif not found.is_whole:
        notes = [_UNSEEN.format(MOST_ENTRIES, MOST)]
    return found.requests, wanted.words(), notes


def _letters(yard: Yard, given: RequestSelection) -> _Chosen[DeadLetter]:
    """The letters of those that are named, or of all that match the filter."""
    wanted = _wanted(given)
    if wanted is not None:
        failed = replace(wanted, states=wanted.states or ("failed",))
        heads, notes = _matching(yard, failed.query(until_ms=given.get("until", 0)))
        return heads, wanted.words(), notes
    owners, words = _selected(given)
    known = {(one.client, one.id): one for one in by_ledger(yard, owners)}
    ended_ms = {owner: one.ended_ms for owner, one in known.items() if one.state == "failed"}
    letters = letters_of(yard, ended_ms)
    for owner in owners:
        # A letter may outlive the ledger of its request.
        alone = find_letter(yard, owner[1]) if owner not in known else None
        if alone and alone.client == owner[0]:
            letters[owner] = alone
    rest = (known[one].state if one in known else "" for one in owners if one not in letters)
    problems = Counter(_IN_THE_WAY[state] for state in rest)
    return list(letters.values()), words, _told(problems)


def _wanted(given: RequestSelection) -> Filter | None:
    """The filter if all that match it are wanted; None where requests are named."""
    if given.get("all") and given.get("request"):
        raise BadInput("both are given: name requests, or give --all")
    return read_filter(given) if given.get("all") else None


def _selected(given: RequestSelection) -> tuple[list[Owned], str]:
    """The requests that are named, and these in words; raises `Refused` for none."""
    names = given.get("request", ())
    if not names:
        raise BadInput("no request is named: name requests, or give --all")
    if len(names) > MOST:
        raise BadInput(f"more than {MOST:,} requests are selected: select fewer at once")
    owners = [named_request(name) for name in names]
    return owners, listed([_name(*owner) for owner in owners], _MOST_NAMED)


def _told(problems: Counter[str]) -> list[str]:
    return [f"{count:,}: {words}" for words, count in problems.items()]


def _sentences(texts: Sequence[str]) -> str:
    return "".join(f" {text}." for text in texts)


def _have_ended(count: int) -> str:
    return f"{counted(count, 'request')} had ended already"


def _name(client: str, request_id: str) -> str:
    return f"{client}/{printable(request_id)}"


OPERATIONS: Final[tuple[Operation, ...]] = (cancel, requeue)
#: A letter is written in the call that ends its request, so both have nearly the same time.
_BEFORE_MS: Final = 2
_AFTER_MS: Final = 100
#: Why a request without a letter cannot be requeued, by its state; "" is that of an unknown one.
_IN_THE_WAY: Final[Mapping[str, str]] = {
    "waiting": "waits already",
    "assigned": "runs already",
    "completed": "has completed",
    "cancelled": "was cancelled; submit it again under another id",
    "expired": "has expired; submit it again under another id",
    "failed": "failed without a dead letter, so it was not kept: submit it again under another id",
    "": "is not known here, and not a dead letter",
}


def letters_of(yard: Yard, ended_ms: Mapping[Owned, int]) -> dict[Owned, DeadLetter]:
    """The letters of requests that ended at these times, by client and id."""
    found: dict[Owned, DeadLetter] = {}
    for since_ms, until_ms in _spans(at_ms for at_ms in ended_ms.values() if at_ms > 0):
        wanted = LetterFilter(since_ms=since_ms, until_ms=until_ms)
        for piece in all_heads(yard, wanted, ""):
            found |= {_owner(one): one for one in piece if _owner(one) in ended_ms}
    return found


def _spans(times_ms: Iterable[int]) -> list[tuple[int, int]]:
    """The spans in which letters of these times may lie, those that overlap as one."""
    spans: list[tuple[int, int]] = []
    for at_ms in sorted(times_ms):
        since_ms, until_ms = max(0, at_ms - _BEFORE_MS), at_ms + _AFTER_MS
        if spans and since_ms <= spans[-1][1]:
            since_ms, _ = spans.pop()
        spans.append((since_ms, until_ms))
    return spans


def _matching(yard: Yard, query: Query) -> tuple[Sequence[DeadLetter], Sequence[str]]:
    """The letters whose requests fit a query, the oldest first, and what was not reached."""
    if "failed" not in query.states:
        return [], []
    give_up = clock.monotonic() + _SEARCH_S
    now_ms = unix_ms(yard.connection.time())
    wanted = LetterFilter(
        model=query.model,
        client=query.client,
        tenant=query.tenant,
        since_ms=max(0, now_ms - query.newer_ms) if query.newer_ms else 0,
    )
    found: dict[Owned, DeadLetter] = {}
    for piece in all_heads(yard, wanted, ""):
        workers: dict[Owned, str] = {}
        if query.worker:  # which only ledgers know
            known = by_ledger(yard, map(_owner, piece))
            workers = {(one.client, one.id): one.worker for one in known}
        for head in filter(lambda one: one.is_answerable, piece):
            owner = _owner(head)
            if query.fits(now_ms, _listed(head, workers.get(owner, ""))):
                found[owner] = head
        if len(found) > MOST:
            return [*found.values()][:MOST], [_MORE.format(MOST)]
        if clock.monotonic() > give_up:
            return [*found.values()], [_UNREAD]
    return [*found.values()], []


def _listed(head: DeadLetter, worker: str) -> Listed:
    """The failed request of a letter."""
    error, _, message = head.reason.partition(": ")
    return Listed(
        client=head.client,
        id=head.id,
        state="failed",
        model=head.model,
        tenant=head.tenant,
        worker=worker,
        server_id=head.server_id,
        accepted_ms=accepted_ms(head.server_id),
        ended_ms=head.died_ms,
        error=error,
        message=message,
    )


def _owner(head: DeadLetter) -> Owned:
    return head.client, head.id
