"""What can be done with dead letters: requeue or drop one, several, or all that a filter finds."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypedDict, Unpack

from redis.exceptions import NoScriptError

from tokenyard import clock
from tokenyard.ops.audit import COMMAND_LINE
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.protocol.errors import BadInput, Refused
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import cut, printable
from tokenyard.scripts import Scripts
from tokenyard.scripts.calls import command_of
from tokenyard.scripts.client import requeue as requeue_call
from tokenyard.yard.letters import (
    CODES,
    NO_CODE,
    DeadLetter,
    LetterFilter,
    all_heads,
    count_letters,
    find_letter,
    named_heads,
    newest_letter,
    text_of,
)
from tokenyard.yard.reads import is_entry

#: Why nothing was done with a letter.
GONE: Final = "gone"
NO_CLIENT: Final = "without a client that could be answered"
_IN_PROGRESS: Final[Mapping[str, str]] = {
    "waiting": "its request waits already",
    "assigned": "its request runs already",
}
_OTHER: Final = "its id belongs to another request"
_MOST_EXAMPLES: Final = 20
_LONGEST: Final = 200  # characters of a reason

#: Does something with letters; for each, by its name, why it was impossible, or "".
Change = Callable[[Yard, Sequence[DeadLetter]], dict[str, str]]
#: Letters by name, None where it is gone.
Piece = Sequence[tuple[str, DeadLetter | None]]


@dataclass(slots=True)
class Changed:
    """What became of some letters."""

    done: int = 0
    #: How many were left as they are, by the reason.
    problems: Counter[str] = field(default_factory=Counter)
    #: The names of some of them.
    examples: list[str] = field(default_factory=list)
    #: False: the time was over before all were looked at.
    is_whole: bool = True


def requeue_letters(yard: Yard, heads: Sequence[DeadLetter]) -> dict[str, str]:
    """Submit their requests again; for each letter why that was impossible, or ""."""
    problems = {head.letter: NO_CLIENT for head in heads}
    answerable = [head for head in heads if head.is_answerable]
    calls = [
        requeue_call(yard.keys, head.letter, head.client, head.id, head.intake)
        for head in answerable
    ]
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(*command_of(call))
    scripts, refused = Scripts(yard), list[DeadLetter]()
    answers = pipeline.execute(raise_on_error=False)
    for head, call, said in zip(answerable, calls, answers, strict=True):
        answer = scripts.call(call) if isinstance(said, NoScriptError) else said
        problems[head.letter] = ""
        if isinstance(answer, Exception):
            problems[head.letter] = f"the broker refused it: {answer}"[:_LONGEST]
        elif not answer:
            refused.append(head)
    return problems | _obstacles(yard, refused)


def _obstacles(yard: Yard, letters: Sequence[DeadLetter]) -> dict[str, str]:
    """Why the requests of answerable letters were not submitted again."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for letter in letters:
        pipeline.xrange(yard.keys.dead, letter.letter, letter.letter)
        pipeline.hget(yard.keys.ledger(letter.client, letter.id), "state")
    found = pipeline.execute(raise_on_error=False)
    return {
        letter.letter: _IN_PROGRESS.get(text_of(state) if isinstance(state, bytes) else "", _OTHER)
        if is_there
        else GONE
        for letter, is_there, state in zip(letters, found[::2], found[1::2], strict=True)
    }


def drop_letters(yard: Yard, heads: Sequence[DeadLetter]) -> dict[str, str]:
    """Delete them; for each letter "", or that it was gone."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for head in heads:
        pipeline.xdel(yard.keys.dead, head.letter)
    answers = zip(heads, pipeline.execute(), strict=True)
    return {head.letter: "" if deleted else GONE for head, deleted in answers}


def change_letters(
    yard: Yard, pieces: Iterable[Piece], change: Change, within_s: float = math.inf
) -> Changed:
    """Change the letters of all pieces, one piece after the other, until the time is over."""
    changed = Changed()
    give_up = clock.monotonic() + within_s
    for piece in pieces:
        if clock.monotonic() > give_up:
            changed.is_whole = False
            break
        problems = dict.fromkeys((name for name, _ in piece), GONE)
        problems |= change(yard, [head for _, head in piece if head])
        failed = {name: why for name, why in problems.items() if why}
        changed.done += len(problems) - len(failed)
        changed.problems.update(failed.values())
        room = _MOST_EXAMPLES - len(changed.examples)
        changed.examples += [name for name, why in failed.items() if why != GONE][:room]
    return changed


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


class LetterSelection(TypedDict, total=False):
    """The letters that are meant: some that are named, or all that a filter finds."""

    letter: Annotated[tuple[str, ...], Field(noun="letter")]
    all: Annotated[bool, Field(hint="All that the filter finds; all there are without one.")]
    reason: Annotated[str, Field(hint=f"Only those of this reason: {', '.join(REASONS)}.")]
    model: Annotated[str, Field(hint="Only those of this model.")]
    client: Annotated[str, Field(hint="Only those of this client.")]
    tenant: Annotated[str, Field(hint="Only those of this tenant.")]
    text: Annotated[str, Field(hint="Only those whose reason has this text.")]
    since: Annotated[str, Field(hint="Only those that died since then: 2026-11-23T06:15, in UTC.")]
    until: Annotated[str, Field(hint="Only those that died before then.")]
    upto: Annotated[str, Field(is_hidden=True)]  # the newest letter when it was asked for


_REQUEUED: Final = (
    "Requests wait again under their ids, and new results replace the failed ones."
    " An expired deadline stays expired."
)
_DROPPED: Final = "This cannot be undone. Results of requests stay until they expire."


def wanted_letters(given: Mapping[str, Any]) -> LetterFilter:
    """The filter that these parameters mean; raises `BadInput`."""
    code = given.get("reason", "")
    if code not in {"", *REASONS}:
        raise BadInput(f"reason: give one of {', '.join(REASONS)}", "reason")
    return LetterFilter(
        code=code,
        **{name: given.get(name, "") for name in ("model", "client", "tenant", "text")},
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


def _preview_of(verb: str, means: str) -> Callable[..., Preview]:
    def preview(yard: Yard, _caller: Caller, **given: Unpack[LetterSelection]) -> Preview:
        names = _named(yard, given)
        if names:
            pieces = named_heads(yard, names[:_MOST_ITEMS])
            items = [_item(name, head) for piece in pieces for name, head in piece]
            return Preview(f"{verb} {_letters(len(names))}. {means}", items, len(names))
        last, words = _last(yard, given), _words_of(given)
        found = count_letters(yard, wanted_letters(given), last, _COUNT_S)
        if not found.count:
            none = f"No dead letter matches {words}." if words else "None is left."
            return Preview(none, count=0)
        at = datetime.datetime.fromtimestamp(_seconds(last), datetime.UTC)
        least = "" if found.is_whole else "at least "
        return Preview(
            f"{verb} {least}{_letters(found.count)}{f' with {words}' if words else ''}, up to"
            f" the one of {at:%Y-%m-%d %H:%M:%S}Z; later ones stay. {means}",
            [_item(head.letter, head) for head in found.first],
            found.count,
        )

    return preview


def _change(
    yard: Yard, caller: Caller, done: str, change: Change, given: LetterSelection
) -> Outcome:
    names = _named(yard, given)
    if names:
        changed = change_letters(yard, named_heads(yard, names), change)
        target = f"dead letter {names[0]}" if len(names) == 1 else _letters(len(names))
        details = {"letters": " ".join(names)}
    else:
        last, words = _last(yard, given), _words_of(given)
        within_s = math.inf if caller.role == COMMAND_LINE else _ACT_S
        found = all_heads(yard, wanted_letters(given), last)
        pieces = ([(head.letter, head) for head in piece] for piece in found)
        changed = change_letters(yard, pieces, change, within_s)
        target = f"dead letters with {words}" if words else "all dead letters"
        details = {"up to": last}
    if changed.examples:
        details["not done"] = " ".join(changed.examples)
    return Outcome(
        _told(done, changed),
        cut(target, _TARGET),
        details=details,
        fields={
            done: changed.done,
            "not_done": dict(changed.problems),
            "examples": changed.examples,
            "is_whole": changed.is_whole,
        },
        is_partial=bool(changed.problems) or not changed.is_whole,
    )


def _named(yard: Yard, given: LetterSelection) -> list[str]:
    """The letters that are named; none if all that match are meant. Raises `BadInput`."""
    names = given.get("letter", ())
    if len(names) > _MOST_NAMED:
        raise BadInput(f"letter: name at most {_MOST_NAMED} at once")
    if bool(names) == bool(given.get("all") or given.get("upto")):
        raise BadInput("name letters, or give --all")
    found = (name if is_entry(name) else _by_request(yard, name) for name in names)
    return list(dict.fromkeys(found))


def _by_request(yard: Yard, name: str) -> str:
    """The letter of a request's id."""
    found = find_letter(yard, name)
    if found is None:
        raise Refused(f"there is no dead letter {name[:200]!r}")
    return found.letter


def _last(yard: Yard, given: LetterSelection) -> str:
    """The newest letter when this was asked; raises `BadInput`."""
    last = given.get("upto") or newest_letter(yard) or "1-0"
    if not is_entry(last):
        raise BadInput("upto: give the name of a dead letter")
    return last


def _seconds(letter: str) -> float:
    """When it died, for `datetime`."""
    return min(int(letter.partition("-")[0]) / 1000, 253_402_300_799.0)


def _item(name: str, head: DeadLetter | None) -> str:
    if head is None:
        return f"{name}: gone"
    owner = f"{head.client}/{printable(head.id)}" if head.is_answerable else "no client"
    return f"{name} ({owner}): {cut(head.reason, _ITEM)}"


def _told(done: str, changed: Changed) -> str:
    """What was done, and what not and why."""
    said = [f"{_letters(changed.done)} {done}"]
    if changed.problems:
        reasons = ", ".join(f"{count:,} ({why})" for why, count in changed.problems.most_common())
        said.append(f"Not {done}: {reasons}")
    if not changed.is_whole:
        said.append(f"It stopped after {_ACT_S:.0f} s: do it again for the rest")
    return ". ".join(said)


def _letters(count: int) -> str:
    return "1 dead letter" if count == 1 else f"{count:,} dead letters"


@operation("dead.requeue", "Requeue dead letters", _preview_of("Requeue", _REQUEUED))
def requeue(yard: Yard, caller: Caller, **given: Unpack[LetterSelection]) -> Outcome:
    """Submit the requests of dead letters again.

    They keep their ids, and new results replace the failed ones. An expired deadline stays expired.
    LETTER is a name from `tokenyard dead list`, or the id of the request.

    Examples:
      tokenyard dead requeue 1763700000000-0
      tokenyard dead requeue --all --reason INFERENCE_ERROR --model adder
    """
    return _change(yard, caller, "requeued", requeue_letters, given)


@operation("dead.drop", "Drop dead letters", _preview_of("Drop", _DROPPED), is_dangerous=True)
def drop(yard: Yard, caller: Caller, **given: Unpack[LetterSelection]) -> Outcome:
    """Delete dead letters; the results of their requests stay until they expire.

    LETTER is a name from `tokenyard dead list`, or the id of the request.

    Examples:
      tokenyard dead drop q7
      tokenyard dead drop --all --until 2026-11-01T00:00
    """
    return _change(yard, caller, "dropped", drop_letters, given)


OPERATIONS: Final[tuple[Operation, ...]] = (requeue, drop)
