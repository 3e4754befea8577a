"""Cancel and requeue: one request, selected ones, or all that match a filter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from tokenyard.admin.dead_letters import (
    DeadLetter,
    letters_of,
    requeue_letter,
    why_not_requeued,
)
from tokenyard.admin.listed import IN_FLIGHT, Listed, by_ledger
from tokenyard.admin.requests import Query, list_requests
from tokenyard.board.action import Action, Outcome, Preview, Refused
from tokenyard.board.addresses import named_request
from tokenyard.board.requests.filters import read_filter
from tokenyard.board.yard import BadInput, Given, Yard
from tokenyard.protocol.texts import counted, printable
from tokenyard.scripts import Cancelled, Scripts

#: Most requests of one action.
MOST: Final = 1_000
#: Most entries of queues to read for all that match, and most keys to look at.
MOST_ENTRIES: Final = 20_000
MOST_KEYS: Final = 100_000
#: Requests that a preview names.
_MOST_NAMED: Final = 10
FAILED: Final = frozenset({"failed"})


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The requests of an action."""

    requests: list[Listed]
    words: str  # for the audit
    note: str = ""  # what was not reached, and what to do


def preview_cancel(yard: Yard, given: Given) -> Preview:
    """What a cancel would end."""
    chosen = _chosen(yard, given, IN_FLIGHT)
    running = [one for one in chosen.requests if not one.is_ended]
    over = len(chosen.requests) - len(running)
    ended = f" {_have_ended(over)}." if over else ""
    if not running:
        return Preview(f"There is nothing to cancel.{ended}{chosen.note}", count=0)
    states = Counter(one.state for one in running)
    which = " and ".join(f"{states[state]:,} {state}" for state in sorted(states))
    their = "Its" if len(running) == 1 else "Each"
    return Preview(
        f"Cancel {counted(len(running), 'request')} ({which})? {their} result becomes `cancelled`,"
        f" with the tokens published so far; workers stop at once.{ended}{chosen.note}",
        items=_named([f"{_name(one.client, one.id)}, {one.state}" for one in running]),
        count=len(running),
    )


def cancel(yard: Yard, given: Given) -> Outcome:
    """Cancel them, each wherever it is now."""
    chosen = _chosen(yard, given, IN_FLIGHT)
    why = given.text("why")
    reason = f"cancelled by an operator: {why}" if why else "cancelled by an operator"
    scripts, codes = Scripts(yard.connection, yard.keys), Counter[Cancelled]()
    for one in chosen.requests:
        if not one.is_ended:
            codes[scripts.cancel(one.client, one.id, reason)] += 1
    unknown = codes[Cancelled.CANCELLED_BEFORE_ARRIVAL]
    done = codes[Cancelled.CANCELLED] + unknown
    over = len(chosen.requests) - done - codes[Cancelled.MOVED]
    if not done and not codes[Cancelled.MOVED]:
        raise Refused(f"Nothing was cancelled. {_have_ended(over)}." if over else _NOTHING)
    text = f"{counted(done, 'request')} cancelled."
    if unknown:
        text += f" {unknown:,} of them had not been looked at yet: they do not run."
    if over:
        text += f" {_have_ended(over)}."
    if codes[Cancelled.MOVED]:
        text += f" {codes[Cancelled.MOVED]:,} moved all the time: cancel again."
    return Outcome(text + chosen.note, chosen.words)


def preview_requeue(yard: Yard, given: Given) -> Preview:
    """What a requeue would bring back."""
    chosen = _chosen(yard, given, FAILED)
    letters, problems = _letters(yard, chosen)
    rest = "".join(f" {text}." for text in problems)
    if not letters:
        return Preview(f"There is nothing to requeue.{rest}{chosen.note}", count=0)
    what = "it keeps its id" if len(letters) == 1 else "they keep their ids"
    return Preview(
        f"Submit {counted(len(letters), 'failed request')} again? New results replace the failed"
        f" ones; {what}.{rest}{chosen.note}",
        items=_named([_name(one.client, one.id) for one in letters]),
        count=len(letters),
    )


def requeue(yard: Yard, given: Given) -> Outcome:
    """Submit them again from their dead letters."""
    chosen = _chosen(yard, given, FAILED)
    letters, problems = _letters(yard, chosen)
    done = sum(bool(requeue_letter(yard.connection, yard.keys, letter)) for letter in letters)
    rest = "".join(f" {text}." for text in problems)
    if not done:
        raise Refused(f"Nothing was requeued.{rest}" if rest else _NOTHING)
    missed = len(letters) - done
    if missed:
        rest += f" {missed:,} could not be requeued any more."
    waits = "waits" if done == 1 else "wait"
    return Outcome(f"{counted(done, 'request')} {waits} again.{rest}{chosen.note}", chosen.words)


_NOTHING: Final = "There is no such request any more."


def _chosen(yard: Yard, given: Given, states: frozenset[str]) -> _Chosen:
    """Those named in the fields ``request``, or all that match the filter where ``all`` is set."""
    names = list(dict.fromkeys(given.texts("request")))
    if given.text("all") == "matching":
        return _matching(yard, given, states)
    if not names:
        raise Refused("No request is selected: check the boxes of some, or open one.")
    if len(names) > MOST:
        raise BadInput(f"more than {MOST:,} requests are selected: select fewer at once")
    owners = [named_request(name) for name in names]
    known = {(one.client, one.id): one for one in by_ledger(yard.connection, yard.keys, owners)}
    # A request by plain XADD has no ledger while it waits.
    plain = [
        Listed(client=client, id=request_id, state="waiting")
        for client, request_id in owners
        if (client, request_id) not in known
    ]
    shown = ", ".join(_name(*owner) for owner in owners[:_MOST_NAMED])
    more = f" and {len(owners) - _MOST_NAMED:,} more" if len(owners) > _MOST_NAMED else ""
    return _Chosen([*known.values(), *plain], f"{shown}{more}")


def _matching(yard: Yard, given: Given, states: frozenset[str]) -> _Chosen:
    wanted = read_filter(given)
    if wanted.states and not states & set(wanted.states):
        return _Chosen([], wanted.words())
    query: Query = wanted.query(
        limit=MOST,
        most=MOST_ENTRIES,
        most_keys=MOST_KEYS,
        most_streams=MOST,
        until_ms=given.whole("until", 0, 0, 2**53),
    )
    found = list_requests(
        yard.connection, yard.keys, replace(query, states=_narrowed(query.states, states))
    )
    note = ""
    if found.has_more:
        note = f" More than {MOST:,} match: these are the first; do it again for the rest."
    elif not found.is_whole:
        note = (
            f" There may be more: only {MOST_ENTRIES:,} waiting requests, as many on lanes, and"
            f" {MOST_KEYS:,} keys were searched. Narrow the filter, or do it again."
        )
    return _Chosen(found.requests, wanted.words(), note)


def _narrowed(wanted: frozenset[str], states: frozenset[str]) -> frozenset[str]:
    """The states to act on; a filter that names none means all that the action is for."""
    return wanted & states or states


def _letters(yard: Yard, chosen: _Chosen) -> tuple[list[DeadLetter], list[str]]:
    """Their dead letters, and why those that have none cannot be requeued."""
    ended_ms = {(one.client, one.id): one.ended_ms for one in chosen.requests if one.is_ended}
    letters = letters_of(yard.connection, yard.keys, ended_ms)
    problems = Counter(
        why_not_requeued(one.state)
        for one in chosen.requests
        if (one.client, one.id) not in letters
    )
    return list(letters.values()), [f"{count:,}: {words}" for words, count in problems.items()]


def _have_ended(count: int) -> str:
    return f"{counted(count, 'request')} had ended already"


def _named(names: list[str]) -> list[str]:
    more = len(names) - _MOST_NAMED
    return [*names[:_MOST_NAMED], f"and {more:,} more"] if more > 0 else names


def _name(client: str, request_id: str) -> str:
    return f"{client}/{printable(request_id)}"


ACTIONS: Final = (
    Action(
        "request.cancel", "Cancel requests", "operator", preview_cancel, cancel, is_dangerous=True
    ),
    Action("request.requeue", "Requeue requests", "operator", preview_requeue, requeue),
)
