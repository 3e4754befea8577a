"""Cancel and requeue: one request, selected ones, or all that match a filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tokenyard.admin.letter_changes import requeue_letters
from tokenyard.admin.letter_lists import LetterHead
from tokenyard.admin.listed import IN_FLIGHT, Listed, by_ledger
from tokenyard.admin.requests import list_requests
from tokenyard.admin.requeueing import letters_of, matching_letters, what_is_in_the_way
from tokenyard.board.action import Action, Preview
from tokenyard.board.addresses import named_request
from tokenyard.board.requests.filters import Filter, read_filter
from tokenyard.board.yard import Parameters
from tokenyard.ops.operation import Outcome
from tokenyard.protocol.errors import BadInput, Refused
from tokenyard.protocol.texts import counted, printable
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Cancelled, Scripts

#: Most requests of one action.
MOST: Final = 1_000
#: Most entries of intakes to read for all that match, and as many of lanes; most keys to look at.
MOST_ENTRIES: Final = 20_000
MOST_KEYS: Final = 100_000
#: Requests that a preview names.
_MOST_NAMED: Final = 10
_FAILED: Final = frozenset({"failed"})
#: A search of dead letters ends after so long.
_SEARCH_S: Final = 10.0
_UNREAD: Final = " There may be more: not all dead letters were read. Narrow the filter."
_MORE: Final = " More than {:,} match: these are the first; do it again for the rest."


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The requests to cancel."""

    requests: Sequence[Listed]
    words: str  # for the audit
    note: str = ""  # what was not reached, and what to do

    @property
    def running(self) -> list[Listed]:
        """Those that have no result yet."""
        return [one for one in self.requests if not one.is_ended]


@dataclass(frozen=True, slots=True)
class _Letters:
    """The failed requests to requeue."""

    heads: Sequence[LetterHead]
    words: str  # for the audit
    note: str = ""  # what cannot be requeued, or was not reached


def preview_cancel(yard: Yard, given: Parameters) -> Preview:
    """What a cancel would end."""
    chosen = _chosen(yard, given)
    running = chosen.running
    over = len(chosen.requests) - len(running)
    ended = f" {_have_ended(over)}." if over else ""
    if not running:
        return Preview(f"There is nothing to cancel.{ended}{chosen.note}", count=0)
    states = Counter(one.state for one in running)
    which = " and ".join(f"{states[state]:,} {state}" for state in sorted(states))
    they = "It ends" if len(running) == 1 else "They end"
    return Preview(
        f"Cancel {counted(len(running), 'request')} ({which})? {they} as cancelled,"
        f" with the tokens published so far; workers stop at once.{ended}{chosen.note}",
        items=[f"{_name(one.client, one.id)}, {one.state}" for one in running[:_MOST_NAMED]],
        count=len(running),
    )


def cancel(yard: Yard, given: Parameters) -> Outcome:
    """Cancel them, each wherever it is now."""
    chosen = _chosen(yard, given)
    by = "cancelled by an operator"
    reason = f"{by}: {given.why}" if given.why else by
    scripts, codes = Scripts(yard), Counter[Cancelled]()
    for one in chosen.running:
        codes[scripts.cancel(one.client, one.id, reason)] += 1
    unknown, moved = codes[Cancelled.CANCELLED_BEFORE_ARRIVAL], codes[Cancelled.MOVED]
    done = codes[Cancelled.CANCELLED] + unknown
    over = len(chosen.requests) - done - moved
    if not done and not moved:
        raise Refused(f"Nothing was cancelled. {_have_ended(over)}." if over else _NOTHING)
    text = f"{counted(done, 'request')} cancelled."
    if unknown:
        text += f" {unknown:,} of them had not been looked at yet: they do not run."
    if over:
        text += f" {_have_ended(over)}."
    if moved:
        text += f" {moved:,} moved all the time: cancel again."
    return Outcome(text + chosen.note, chosen.words)


def preview_requeue(yard: Yard, given: Parameters) -> Preview:
    """What a requeue would bring back."""
    letters = _letters(yard, given)
    count = len(letters.heads)
    if not count:
        return Preview(f"There is nothing to requeue.{letters.note}", count=0)
    what = "it keeps its id" if count == 1 else "they keep their ids"
    return Preview(
        f"Submit {counted(count, 'failed request')} again? New results replace the failed ones;"
        f" {what}.{letters.note}",
        items=[_name(one.client, one.id) for one in letters.heads[:_MOST_NAMED]],
        count=count,
    )


def requeue(yard: Yard, given: Parameters) -> Outcome:
    """Submit them again from their dead letters."""
    letters = _letters(yard, given)
    problems = requeue_letters(yard, letters.heads)
    note = _told(Counter(problem for problem in problems if problem)) + letters.note
    done = problems.count("")
    if not done:
        raise Refused(f"Nothing was requeued.{note}" if note else _NOTHING)
    waits = "waits" if done == 1 else "wait"
    return Outcome(f"{counted(done, 'request')} {waits} again.{note}", letters.words)


_NOTHING: Final = "There is no such request any more."


def _chosen(yard: Yard, given: Parameters) -> _Chosen:
    """Those named in the fields ``request``, or all in flight that match the filter."""
    wanted = _wanted(given)
    if wanted is None:
        requests, words = _selected(yard, given)
        return _Chosen(requests, words)
    if not wanted.wanted_states & IN_FLIGHT:
        return _Chosen([], wanted.words())
    query = wanted.query(
        limit=MOST,
        most=MOST_ENTRIES,
        most_keys=MOST_KEYS,
        most_streams=MOST,
        states=IN_FLIGHT,
        until_ms=_until_ms(given),
    )
    found = list_requests(yard, query)
    note = ""
    if found.has_more:
        note = _MORE.format(MOST)
    elif not found.is_whole:
        note = (
            f" There may be more: only {MOST_ENTRIES:,} waiting requests, as many on lanes, and the"
            f" queues of {MOST:,} tenants were read. Narrow the filter, or do it again."
        )
    return _Chosen(found.requests, wanted.words(), note)


def _letters(yard: Yard, given: Parameters) -> _Letters:
    """The letters of those named in the fields ``request``, or of all that match the filter."""
    wanted = _wanted(given)
    if wanted is not None:
        states = _FAILED if not wanted.states else frozenset(wanted.states)
        query = wanted.query(
            limit=MOST, most=0, most_keys=0, most_streams=0, until_ms=_until_ms(given)
        )
        query = replace(query, states=states)
        found = matching_letters(yard, query, MOST, _SEARCH_S)
        note = "" if found.is_whole else _UNREAD
        return _Letters(found.heads, wanted.words(), _MORE.format(MOST) if found.has_more else note)
    requests, words = _selected(yard, given)
    ended_ms = {(one.client, one.id): one.ended_ms for one in requests if one.state == "failed"}
    letters = letters_of(yard, ended_ms)
    rest = (one.state for one in requests if (one.client, one.id) not in letters)
    return _Letters(list(letters.values()), words, _told(Counter(map(what_is_in_the_way, rest))))


def _wanted(given: Parameters) -> Filter | None:
    """The filter if all that match it are wanted; None where requests are named."""
    return read_filter(given) if given.text("all") == "matching" else None


def _until_ms(given: Parameters) -> int:
    return given.whole("until", 0, 0, 2**53)


def _selected(yard: Yard, given: Parameters) -> tuple[list[Listed], str]:
    """The requests named in the fields, and these in words; raises `Refused` for none."""
    names = list(dict.fromkeys(given.texts("request")))
    if not names:
        raise Refused("No request is selected: check the boxes of some, or open one.")
    if len(names) > MOST:
        raise BadInput(f"more than {MOST:,} requests are selected: select fewer at once")
    owners = [named_request(name) for name in names]
    known = {(one.client, one.id): one for one in by_ledger(yard, owners)}
    # A request by plain XADD has no ledger while it waits.
    requests = [
        known.get(one) or Listed(client=one[0], id=one[1], state="waiting") for one in owners
    ]
    shown = ", ".join(_name(*owner) for owner in owners[:_MOST_NAMED])
    more = f" and {len(owners) - _MOST_NAMED:,} more" if len(owners) > _MOST_NAMED else ""
    return requests, f"{shown}{more}"


def _told(problems: Counter[str]) -> str:
    return "".join(f" {count:,}: {words}." for words, count in problems.items())


def _have_ended(count: int) -> str:
    return f"{counted(count, 'request')} had ended already"


def _name(client: str, request_id: str) -> str:
    return f"{client}/{printable(request_id)}"


ACTIONS: Final = (
    Action(
        "request.cancel", "Cancel requests", "operator", preview_cancel, cancel, is_dangerous=True
    ),
    Action("request.requeue", "Requeue requests", "operator", preview_requeue, requeue),
)
