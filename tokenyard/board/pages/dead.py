"""Dead letters: the list, and one letter with the evidence of its crash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenyard.board.page import NotFound, Parameters, address
from tokenyard.ops.letters import FILTERS, REASONS, wanted_letters
from tokenyard.protocol.errors import BadInput, Code
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import cut
from tokenyard.protocol.wire import SYSTEM_FIELDS
from tokenyard.yard.letters import named_letter, newest_letter, read_page
from tokenyard.yard.reads import is_entry
from tokenyard.yard.timeline import read_attempts

_SIZES: Final = ("50", "100", "200")
#: Characters of a reason, of a field, and of a name.
_REASON: Final = 4_000
_FIELD: Final = 8_000
_NAME: Final = 120
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


def view_letters(yard: Yard, given: Parameters) -> dict[str, Any]:
    """The letters that fit the filter in the address, and where to go on."""
    asked = {name: given.text(name) for name in FILTERS}
    wanted = wanted_letters(asked)
    show = given.one_of("show", _SIZES, _SIZES[0])
    before = given.text("before")
    if before and not is_entry(before):
        raise BadInput("before: give the name of a letter")
    page = read_page(yard, wanted, before=before, most=int(show))
    newest = newest_letter(yard)
    filters = {name: text for name, text in asked.items() if text}
    here = {**filters, "show": show if show != _SIZES[0] else ""}
    return {
        "total": yard.connection.xlen(yard.keys.dead),
        "newest": newest,
        "newest_ms": int(newest.partition("-")[0] or 0),
        "heads": page.heads,
        "looked_at": page.looked_at,
        "older": address("/dead", {**here, "before": page.older}) if page.older else "",
        "first": address("/dead", here) if before else "",
        "here": address("/dead", {**here, "before": before}),
        "asked": asked,
        "filters": filters,
        "codes": REASONS,
        "show": show,
        "sizes": _SIZES,
    }


def view_letter(yard: Yard, given: Parameters) -> dict[str, Any]:
    """One letter."""
    name = given.text("letter")
    letter = named_letter(yard, name) if is_entry(name) else None
    if letter is None:
        raise NotFound(
            f"There is no dead letter {name[:60]}: it was requeued or dropped, or newer ones have"
            " replaced it."
        )
    code = letter.code
    means, todo = _MEANING[code] if code or not letter.is_answerable else ("", "")
    attempts = []
    if letter.is_answerable:
        attempts = read_attempts(yard, letter.client, letter.id, letter.server_id)
    return {
        "letter": letter,
        "code": code,
        "reason": cut(letter.why, _REASON),
        "server_id": cut(letter.server_id, _NAME),
        "model": cut(letter.model, _NAME),
        "means": means,
        "todo": todo,
        "history": [
            (words, letter.fields[name][:20])
            for name, words in _HISTORY.items()
            if letter.fields.get(name, "0") != "0"
        ],
        "last_reason": cut(letter.fields.get("reason", ""), _REASON),
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
