"""Dead letters requeued and dropped: one, selected ones, or all that match a filter."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Final

from tokenyard.admin.dead_letters import is_letter
from tokenyard.admin.letter_changes import (
    Change,
    Changed,
    change_named,
    change_wanted,
    drop_letters,
    requeue_letters,
)
from tokenyard.admin.letter_lists import LetterHead, count_letters, named_heads
from tokenyard.board.action import Action, ActionRefused, Outcome, Preview
from tokenyard.board.cutting import cut
from tokenyard.board.pages.dead_filter import wanted_letters, words_of
from tokenyard.board.yard import BadInput, Parameters
from tokenyard.protocol.texts import printable
from tokenyard.protocol.yard import Yard

#: Letters that one form can name.
_MOST_NAMED: Final = 500
_MOST_ITEMS: Final = 20
#: Characters of a target, and of a letter in a preview.
_TARGET: Final = 240
_ITEM: Final = 120
#: An action ends after so long, and the count on the page that asks.
_ACT_S: Final = 20.0
_COUNT_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class _LetterAction:
    """One of the two things to do with letters."""

    verb: str  # "Requeue"
    done: str  # "requeued"
    means: str
    change: Change


_REQUEUE: Final = _LetterAction(
    "Requeue",
    "requeued",
    "Requests wait again under their ids, and new results replace the failed ones."
    " An expired deadline stays expired.",
    requeue_letters,
)
_DROP: Final = _LetterAction(
    "Drop",
    "dropped",
    "This cannot be undone. Results of requests stay until they expire.",
    drop_letters,
)


def _preview(yard: Yard, given: Parameters, kind: _LetterAction) -> Preview:
    """What would be done, counted."""
    names = _named(given)
    if names:
        pieces = named_heads(yard, names[:_MOST_ITEMS])
        items = [_item(name, head) for piece in pieces for name, head in piece]
        return Preview(f"{kind.verb} {_letters(len(names))}. {kind.means}", (), items, len(names))
    last, words = _last(given), words_of(given)
    found = count_letters(yard, wanted_letters(given), last, _COUNT_S)
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


def _run(yard: Yard, given: Parameters, kind: _LetterAction) -> Outcome:
    names = _named(given)
    if names:
        changed = change_named(yard, names, kind.change)
        target = f"dead letter {names[0]}" if len(names) == 1 else _letters(len(names))
        details = {"letters": " ".join(names)}
    else:
        wanted, last = wanted_letters(given), _last(given)
        changed = change_wanted(yard, wanted, last, kind.change, _ACT_S)
        words = words_of(given)
        target = f"dead letters with {words}" if words else "all dead letters"
        details = {"up to": last}
    if changed.examples:
        details["not done"] = " ".join(changed.examples)
    return Outcome(_told(kind, changed), cut(target, _TARGET), details=details)


def _named(given: Parameters) -> list[str]:
    """The letters that a form names; none if it means all that match. Raises `ActionRefused`."""
    names = list(dict.fromkeys(given.texts("letter")))
    if len(names) > _MOST_NAMED:
        raise BadInput(f"select at most {_MOST_NAMED} letters at once")
    if not all(map(is_letter, names)):
        raise BadInput("letter: give names of dead letters")
    if not names and not given.text("upto"):
        raise ActionRefused("No dead letter is selected: select some first.")
    return names


def _last(given: Parameters) -> str:
    """The newest letter when this was asked; raises `BadInput`."""
    last = given.text("upto")
    if not is_letter(last):
        raise BadInput("upto: give the name of a dead letter")
    return last


def _seconds(letter: str) -> float:
    """When it died, for `datetime`."""
    return min(int(letter.partition("-")[0]) / 1000, 253_402_300_799.0)


def _item(name: str, head: LetterHead | None) -> str:
    if head is None:
        return f"{name}: gone"
    owner = f"{head.client}/{printable(head.id)}" if head.is_answerable else "no client"
    return f"{name} ({owner}): {cut(head.reason, _ITEM)}"


def _told(kind: _LetterAction, changed: Changed) -> str:
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


def _action(name: str, kind: _LetterAction, *, is_dangerous: bool = False) -> Action:
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
