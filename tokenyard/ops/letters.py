"""What can be done with dead letters: requeue or drop one, several, or all that a filter finds."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from tokenyard.admin.audit import COMMAND_LINE
from tokenyard.admin.dead_letters import find_letter, is_letter
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
    count_letters,
    named_heads,
    newest_letter,
)
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.protocol.errors import BadInput, Refused
from tokenyard.protocol.texts import cut, printable
from tokenyard.protocol.yard import Yard

#: The reasons to choose from.
REASONS: Final = (*CODES, NO_CODE)
#: The parameters that say which letters are wanted, where none is named.
FILTERS: Final = ("reason", "model", "client", "tenant", "text", "since", "until")
#: Letters that can be named at once.
_MOST_NAMED: Final = 500
_MOST_ITEMS: Final = 20
#: Characters of a target, of a letter in a preview, and of a filter in words.
_TARGET: Final = 240
_ITEM: Final = 120
#: An operation ends after so long where a page waits for it, and the count of its preview.
_ACT_S: Final = 20.0
_COUNT_S: Final = 0.2

ChosenLetters = Annotated[tuple[str, ...], Field(noun="letter")]
All = Annotated[bool, Field(hint="All that the filter finds; all there are without one.")]
UpTo = Annotated[str, Field(is_hidden=True)]  # the newest letter when it was asked for
Reason = Annotated[str, Field(hint=f"Only those of this reason: {', '.join(REASONS)}.")]
Model = Annotated[str, Field(hint="Only those of this model.")]
Client = Annotated[str, Field(hint="Only those of this client.")]
Tenant = Annotated[str, Field(hint="Only those of this tenant.")]
Text = Annotated[str, Field(hint="Only those whose reason has this text.")]
Since = Annotated[str, Field(hint="Only those that died since then: 2026-11-23T06:15, in UTC.")]
Until = Annotated[str, Field(hint="Only those that died before then.")]


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the two things to do with letters."""

    verb: str  # "Requeue"
    done: str  # "requeued"
    means: str
    change: Change
    about: str


_REQUEUE: Final = _Kind(
    "Requeue",
    "requeued",
    "Requests wait again under their ids, and new results replace the failed ones."
    " An expired deadline stays expired.",
    requeue_letters,
    """Submit the requests of dead letters again.

    They keep their ids, and new results replace the failed ones. An expired deadline stays expired.
    LETTER is a name from `tokenyard dead list`, or the id of the request.

    Examples:
      tokenyard dead requeue 1763700000000-0
      tokenyard dead requeue --all --reason INFERENCE_ERROR --model adder
    """,
)
_DROP: Final = _Kind(
    "Drop",
    "dropped",
    "This cannot be undone. Results of requests stay until they expire.",
    drop_letters,
    """Delete dead letters; the results of their requests stay until they expire.

    LETTER is a name from `tokenyard dead list`, or the id of the request.

    Examples:
      tokenyard dead drop q7
      tokenyard dead drop --all --until 2026-11-01T00:00
    """,
)


def wanted_letters(given: Mapping[str, Any]) -> LetterFilter:
    """The filter that these parameters mean; raises `BadInput`."""
    code = given.get("reason", "")
    if code not in {"", *REASONS}:
        raise BadInput(f"reason: give one of {', '.join(REASONS)}", "reason")
    return LetterFilter(
        code=code,
        model=given.get("model", ""),
        client=given.get("client", ""),
        tenant=given.get("tenant", ""),
        text=given.get("text", ""),
        since_ms=_time("since", given.get("since", "")),
        until_ms=_time("until", given.get("until", "")),
    )


def _time(name: str, text: str) -> int:
    """A time, in UTC unless it has an offset, as unix ms; 0 for none. Raises `BadInput`."""
    if not text:
        return 0
    try:
        at = datetime.datetime.fromisoformat(text)
        at = at if at.tzinfo else at.replace(tzinfo=datetime.UTC)
        return max(1, int(at.timestamp() * 1000))
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{name}: give a time in UTC like 2026-11-23T06:15", name) from error


def _words_of(given: Mapping[str, Any]) -> str:
    named = ((name, cut(given[name], _ITEM)) for name in FILTERS if given.get(name))
    return ", ".join(f"{name} {text}" for name, text in named)


def _preview_of(kind: _Kind) -> Callable[..., Preview]:
    def preview(yard: Yard, caller: Caller, **given: Any) -> Preview:
        del caller
        names = _named(yard, given)
        if names:
            pieces = named_heads(yard, names[:_MOST_ITEMS])
            items = [_item(name, head) for piece in pieces for name, head in piece]
            return Preview(f"{kind.verb} {_letters(len(names))}. {kind.means}", items, len(names))
        last, words = _last(yard, given), _words_of(given)
        found = count_letters(yard, wanted_letters(given), last, _COUNT_S)
        if not found.count:
            none = f"No dead letter matches {words}." if words else "None is left."
            return Preview(none, count=0)
        at = datetime.datetime.fromtimestamp(_seconds(last), datetime.UTC)
        least = "" if found.is_whole else "at least "
        return Preview(
            f"{kind.verb} {least}{_letters(found.count)}{f' with {words}' if words else ''}, up to"
            f" the one of {at:%Y-%m-%d %H:%M:%S}Z; later ones stay. {kind.means}",
            [_item(head.letter, head) for head in found.first],
            found.count,
        )

    return preview


def _change(yard: Yard, caller: Caller, kind: _Kind, **given: Any) -> Outcome:
    names = _named(yard, given)
    if names:
        changed = change_named(yard, names, kind.change)
        target = f"dead letter {names[0]}" if len(names) == 1 else _letters(len(names))
        details = {"letters": " ".join(names)}
    else:
        last, words = _last(yard, given), _words_of(given)
        within_s = math.inf if caller.role == COMMAND_LINE else _ACT_S
        changed = change_wanted(yard, wanted_letters(given), last, kind.change, within_s)
        target = f"dead letters with {words}" if words else "all dead letters"
        details = {"up to": last}
    if changed.examples:
        details["not done"] = " ".join(changed.examples)
    return Outcome(
        _told(kind, changed),
        cut(target, _TARGET),
        details=details,
        fields={
            kind.done: changed.done,
            "not_done": dict(changed.problems),
            "examples": changed.examples,
            "is_whole": changed.is_whole,
        },
        is_partial=bool(changed.problems) or not changed.is_whole,
    )


def _named(yard: Yard, given: Mapping[str, Any]) -> list[str]:
    """The letters that are named; none if all that match are meant. Raises `BadInput`."""
    names = given.get("letter", ())
    if len(names) > _MOST_NAMED:
        raise BadInput(f"letter: name at most {_MOST_NAMED} at once")
    if bool(names) == bool(given.get("all") or given.get("upto")):
        raise BadInput("name letters, or give --all")
    return [name if is_letter(name) else _by_request(yard, name) for name in dict.fromkeys(names)]


def _by_request(yard: Yard, name: str) -> str:
    """The letter of a request's id."""
    found = find_letter(yard, name)
    if found is None:
        raise Refused(f"there is no dead letter {name[:200]!r}")
    return found.letter


def _last(yard: Yard, given: Mapping[str, Any]) -> str:
    """The newest letter when this was asked; raises `BadInput`."""
    last = given.get("upto") or newest_letter(yard) or "1-0"
    if not is_letter(last):
        raise BadInput("upto: give the name of a dead letter")
    return str(last)


def _seconds(letter: str) -> float:
    """When it died, for `datetime`."""
    return min(int(letter.partition("-")[0]) / 1000, 253_402_300_799.0)


def _item(name: str, head: LetterHead | None) -> str:
    if head is None:
        return f"{name}: gone"
    owner = f"{head.client}/{printable(head.id)}" if head.is_answerable else "no client"
    return f"{name} ({owner}): {cut(head.reason, _ITEM)}"


def _told(kind: _Kind, changed: Changed) -> str:
    """What was done, and what not and why."""
    said = [f"{_letters(changed.done)} {kind.done}"]
    if changed.problems:
        reasons = ", ".join(f"{count:,} ({why})" for why, count in changed.problems.most_common())
        said.append(f"Not {kind.done}: {reasons}")
    if not changed.is_whole:
        said.append(f"It stopped after {_ACT_S:.0f} s: do it again for the rest")
    return ". ".join(said)


def _letters(count: int) -> str:
    return "1 dead letter" if count == 1 else f"{count:,} dead letters"


def _operation(kind: _Kind, *, is_dangerous: bool = False) -> Operation:
    def run(
        yard: Yard,
        caller: Caller,
        *,
        letter: ChosenLetters = (),
        all: All = False,  # noqa: A002 - the name of its option
        reason: Reason = "",
        model: Model = "",
        client: Client = "",
        tenant: Tenant = "",
        text: Text = "",
        since: Since = "",
        until: Until = "",
        upto: UpTo = "",
    ) -> Outcome:
        named = {"letter": letter, "all": all, "upto": upto}
        wanted = {"reason": reason, "model": model, "client": client, "tenant": tenant}
        return _change(yard, caller, kind, **named, **wanted, text=text, since=since, until=until)

    run.__doc__ = kind.about
    name, title = f"dead.{kind.verb.lower()}", f"{kind.verb} dead letters"
    return operation(name, title, _preview_of(kind), is_dangerous=is_dangerous)(run)


requeue: Final = _operation(_REQUEUE)
drop: Final = _operation(_DROP, is_dangerous=True)
OPERATIONS: Final[tuple[Operation, ...]] = (requeue, drop)
