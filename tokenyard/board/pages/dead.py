"""Dead letters: the list, one letter with the evidence of its crash, requeue and drop."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.admin.dead_letters import is_letter, named_letter
from tokenyard.admin.letter_changes import (
    Change,
    Changed,
    change_named,
    change_wanted,
    drop_letters,
    requeue_letters,
)
from tokenyard.admin.letter_lists import (
    CODES,
    NO_CODE,
    LetterFilter,
    LetterHead,
    code_of,
    count_letters,
    named_heads,
    newest_letter,
    read_page,
)
from tokenyard.admin.timeline import read_attempts
from tokenyard.board.action import Action, Outcome, Preview, Refused
from tokenyard.board.addresses import address
from tokenyard.board.cutting import cut
from tokenyard.board.page import NotFound, Page
from tokenyard.board.yard import BadInput, Given, Yard
from tokenyard.protocol.errors import Code
from tokenyard.protocol.texts import printable
from tokenyard.protocol.wire import SYSTEM_FIELDS

_SIZES: Final = ("50", "100", "200")
#: Letters that one form can name.
_MOST_NAMED: Final = 500
_MOST_ITEMS: Final = 20
#: Characters of a reason in the list and on its page, and of a field.
_REASON: Final = 240
_WHOLE_REASON: Final = 4_000
_FIELD: Final = 8_000
_NAME: Final = 120
#: An action ends after so long, and a count before it.
_ACT_S: Final = 20.0
_COUNT_S: Final = 5.0
_FILTERS: Final = ("reason", "model", "client", "tenant", "text", "since", "until")
#: What a reason means, by its code, and what to do.
_MEANING: Final[Mapping[str, tuple[str, str]]] = {
    Code.POISONED: (
        "Its workers died while nothing else ran on them, so the yard takes it for the cause.",
        "Read the request and report the engine's bug. Requeue it once that is fixed.",
    ),
    Code.INFERENCE_ERROR: (
        "An engine could not serve it, several times in a row.",
        "Look at the engine's error. Requeue it once its cause is gone.",
    ),
    Code.WORKER_LOST: (
        "Its worker was lost, and with it which of several choices its tokens belong to.",
        "Requeue it: it starts again from its first token.",
    ),
    Code.ID_REUSED: (
        "Its id is known with another request, whose result is still kept.",
        "Requeue it once that one is forgotten, or drop it.",
    ),
    "": (
        "It names no client that could be answered, so nobody was told, and it cannot run again.",
        "Correct what wrote it, and drop it.",
    ),
}
#: Fields that all may see. Others may have a prompt or an answer.
_SHOWN: Final = frozenset(
    {
        *("id", "client", "model", "params", "stream", "reply_to", "priority", "deadline"),
        *("result_ttl", "tenant", "session", "v"),
        *(name.decode() for name in SYSTEM_FIELDS - {b"published", b"choices"}),
    }
)
#: Counts of its history, in words.
_HISTORY: Final[Mapping[str, str]] = {
    "crashes": "workers lost with it",
    "suspected": "crashes that it may have caused",
    "crashed_alone": "crashes while it ran alone",
    "lost_alone": "workers killed from outside while it ran alone",
    "relapsed": "crashes after it had been acquitted",
    "faults": "times that an engine could not serve it",
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the two things to do with letters."""

    verb: str  # "Requeue"
    done: str  # "requeued"
    means: str
    change: Change


_REQUEUE: Final = _Kind(
    "Requeue",
    "requeued",
    "Their requests wait again under their ids, and new results replace the failed ones."
    " An expired deadline stays expired.",
    requeue_letters,
)
_DROP: Final = _Kind(
    "Drop",
    "dropped",
    "They cannot be brought back. The results of their requests stay until they expire.",
    drop_letters,
)


def _list(yard: Yard, given: Given) -> dict[str, Any]:
    wanted = _wanted(given)
    show = given.one_of("show", _SIZES, _SIZES[0])
    before = given.text("before")
    if before and not is_letter(before):
        raise BadInput("before: give the name of a letter")
    page = read_page(yard.connection, yard.keys, wanted, before=before, most=int(show))
    newest = newest_letter(yard.connection, yard.keys)
    asked = {name: given.text(name) for name in _FILTERS}
    filters = {name: text for name, text in asked.items() if text}
    here = {**filters, "show": show if show != _SIZES[0] else ""}
    return {
        "total": yard.connection.xlen(yard.keys.dead),
        "newest": newest,
        "newest_ms": int(newest.partition("-")[0] or 0),
        "rows": [_row(head) for head in page.heads],
        "looked_at": page.looked_at,
        "older": address("/dead", {**here, "before": page.older}) if page.older else "",
        "first": address("/dead", here) if before else "",
        "here": address("/dead", {**here, "before": before}),
        "asked": asked,
        "filters": filters,
        "codes": (*CODES, NO_CODE),
        "show": show,
        "sizes": _SIZES,
    }


def _row(head: LetterHead) -> dict[str, Any]:
    return {
        "letter": head.letter,
        "died_ms": head.died_ms,
        "client": head.client,
        "id": head.id,
        "model": cut(head.model, _NAME),
        "tenant": cut(head.tenant, _NAME),
        "code": head.code,
        "reason": cut(head.reason.removeprefix(f"{head.code}: "), _REASON),
        "crashes": head.crashes,
        "size": head.size,
    }


def _wanted(given: Given) -> LetterFilter:
    """The filter of a form; raises `BadInput`."""
    return LetterFilter(
        code=given.one_of("reason", ("", *CODES, NO_CODE), ""),
        model=given.text("model"),
        client=given.text("client"),
        tenant=given.text("tenant"),
        text=given.text("text"),
        since_ms=_time(given, "since"),
        until_ms=_time(given, "until"),
    )


def _time(given: Given, name: str) -> int:
    """A time in UTC, unix ms; 0 for none. Raises `BadInput`."""
    text = given.text(name)
    if not text:
        return 0
    try:
        at = datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC)
        return max(1, int(at.timestamp() * 1000))
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{name}: give a time in UTC like 2026-11-23T06:15") from error


def _one(yard: Yard, given: Given) -> dict[str, Any]:
    name = given.text("letter")
    letter = named_letter(yard.connection, yard.keys, name) if is_letter(name) else None
    if letter is None:
        raise NotFound(
            f"There is no dead letter {name[:60]}: it was requeued or dropped, or newer ones have"
            " replaced it."
        )
    code = code_of(letter.reason)
    means, todo = _MEANING[code] if code or not letter.is_answerable else ("", "")
    attempts = []
    if letter.is_answerable:
        attempts = read_attempts(
            yard.connection, yard.keys, letter.client, letter.id, letter.server_id
        )
    return {
        "letter": letter,
        "code": code,
        "reason": cut(letter.reason.removeprefix(f"{code}: "), _WHOLE_REASON),
        "server_id": cut(letter.server_id, _NAME),
        "model": cut(letter.model, _NAME),
        "means": means,
        "todo": todo,
        "history": [
            (words, letter.fields[name][:20])
            for name, words in _HISTORY.items()
            if letter.fields.get(name, "0") != "0"
        ],
        "last_reason": cut(letter.fields.get("reason", ""), _WHOLE_REASON),
        "attempts": attempts,
        "fields": [
            _field(name, value, shows=given.actor.shows_content)
            for name, value in sorted(letter.fields.items())
        ],
    }


def _field(name: str, value: str, *, shows: bool) -> dict[str, Any]:
    """One field of a letter; its text is None where it is hidden."""
    is_shown = shows or name in _SHOWN
    return {
        "name": cut(name, _NAME),
        "length": len(value),
        "text": cut(value, _FIELD) if is_shown else None,
        "is_short": len(value) <= _NAME and "\n" not in value,
    }


def _preview(yard: Yard, given: Given, kind: _Kind) -> Preview:
    """What would be done, counted."""
    names = _named(given)
    if names:
        pieces = named_heads(yard.connection, yard.keys, names[:_MOST_ITEMS])
        items = [_item(name, head) for piece in pieces for name, head in piece]
        return Preview(f"{kind.verb} {_letters(len(names))}. {kind.means}", (), items, len(names))
    last, words = _last(given), _words(given)
    found = count_letters(yard.connection, yard.keys, _wanted(given), last, _COUNT_S)
    if not found.count:
        return Preview(f"No dead letter matches {words}." if words else "None is left.", count=0)
    at = datetime.datetime.fromtimestamp(_seconds(last), datetime.UTC)
    least = "" if found.is_whole else "at least "
    return Preview(
        f"{kind.verb} {least}{_letters(found.count)}{f' with {words}' if words else ''}, up to the"
        f" one of {at:%Y-%m-%d %H:%M:%S}Z; later ones stay. {kind.means}",
        items=[_item(head.letter, head) for head in found.first],
        count=found.count,
    )


def _run(yard: Yard, given: Given, kind: _Kind) -> Outcome:
    names = _named(given)
    if names:
        changed = change_named(yard.connection, yard.keys, names, kind.change)
        target = f"dead letter {names[0]}" if len(names) == 1 else _letters(len(names))
        details = {"letters": cut(" ".join(names), _FIELD)}
    else:
        wanted, last = _wanted(given), _last(given)
        changed = change_wanted(yard.connection, yard.keys, wanted, last, kind.change, _ACT_S)
        words = _words(given)
        target = f"dead letters with {words}" if words else "all dead letters"
        details = {"up to": last}
    if changed.examples:
        details["not done"] = " ".join(changed.examples)
    return Outcome(_told(kind, changed), cut(target, _REASON), details=details)


def _named(given: Given) -> list[str]:
    """The letters that a form names; none if it means all that match. Raises `Refused`."""
    names = list(dict.fromkeys(given.texts("letter")))
    if len(names) > _MOST_NAMED:
        raise BadInput(f"select at most {_MOST_NAMED} letters at once")
    if not all(map(is_letter, names)):
        raise BadInput("letter: give names of dead letters")
    if not names and not given.text("upto"):
        raise Refused("No dead letter is selected: select some first.")
    return names


def _last(given: Given) -> str:
    """The newest letter when this was asked; raises `BadInput`."""
    last = given.text("upto")
    if not is_letter(last):
        raise BadInput("upto: give the name of a dead letter")
    return last


def _seconds(letter: str) -> float:
    """When it died, for `datetime`."""
    return min(int(letter.partition("-")[0]) / 1000, 253_402_300_799.0)


def _words(given: Given) -> str:
    """The filter of a form in words."""
    named = ((name, cut(given.text(name), _NAME)) for name in _FILTERS if given.text(name))
    return ", ".join(f"{name} {text}" for name, text in named)


def _item(name: str, head: LetterHead | None) -> str:
    if head is None:
        return f"{name}: gone"
    owner = f"{head.client}/{printable(head.id)}" if head.is_answerable else "no client"
    return f"{name} ({owner}): {cut(head.reason, _NAME)}"


def _told(kind: _Kind, changed: Changed) -> str:
    """What was done, and what not and why."""
    said = [f"{_letters(changed.done)} {kind.done}."]
    if changed.problems:
        reasons = ", ".join(f"{count:,} ({why})" for why, count in changed.problems.most_common())
        said.append(f"Not {kind.done}: {reasons}.")
    if not changed.is_whole:
        said.append(f"It stopped after {_ACT_S:.0f} s: do it again for the rest.")
    return " ".join(said)


def _letters(count: int) -> str:
    return "1 dead letter" if count == 1 else f"{count:,} dead letters"


PAGES: Final[tuple[Page, ...]] = (
    Page("/dead", "Dead letters", "dead.html", _list, menu="Dead letters", every_s=5.0),
    Page("/dead/{letter}", "Dead letter", "dead_one.html", _one, every_s=10.0),
)


def _action(name: str, kind: _Kind, *, is_dangerous: bool = False) -> Action:
    return Action(
        name=name,
        title=f"{kind.verb} dead letters",
        role="operator",
        preview=lambda yard, given: _preview(yard, given, kind),
        run=lambda yard, given: _run(yard, given, kind),
        is_dangerous=is_dangerous,
    )


ACTIONS: Final[tuple[Action, ...]] = (
    _action("dead.requeue", _REQUEUE),
    _action("dead.drop", _DROP, is_dangerous=True),
)
