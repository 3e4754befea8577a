"""Many dead letters at once: requeued or dropped in pieces, with what was not done and why.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis.exceptions import NoScriptError

from tokenyard import clock
from tokenyard.admin.dead_letters import DeadLetter, text_of
from tokenyard.admin.letter_lists import LetterFilter, LetterHead, all_heads, named_heads
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts, command_of, requeue

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

#: Does something with letters; for each why it was impossible, or "".
Change = Callable[[Yard, Sequence[LetterHead]], list[str]]


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

    def add(self, names: Sequence[str], problems: Sequence[str]) -> None:
        """Count the outcomes of some letters."""
        failed = [(name, why) for name, why in zip(names, problems, strict=True) if why]
        self.done += len(names) - len(failed)
        self.problems.update(why for _, why in failed)
        room = _MOST_EXAMPLES - len(self.examples)
        self.examples += [name for name, why in failed if why != GONE][:room]


def requeue_letters(yard: Yard, heads: Sequence[LetterHead]) -> list[str]:
    """Submit their requests again; for each why that was impossible, or ""."""
    calls = {
        head.letter: requeue(yard.keys, head.letter, head.client, head.id, head.intake)
        for head in heads
        if head.is_answerable
    }
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for call in calls.values():
        pipeline.execute_command(*command_of(call))
    scripts = Scripts(yard)
    problems = {head.letter: NO_CLIENT for head in heads}
    refused: list[LetterHead] = []
    answers = dict(zip(calls, pipeline.execute(raise_on_error=False), strict=True))
    for head in heads:
        answer = answers.get(head.letter)
        if isinstance(answer, NoScriptError):
            answer = scripts.call(calls[head.letter])
        if isinstance(answer, Exception):
            problems[head.letter] = f"the broker refused it: {answer}"[:_LONGEST]
        elif answer:
            problems[head.letter] = ""
        elif head.is_answerable:
            refused.append(head)
    for head, why in zip(refused, obstacles(yard, refused), strict=True):
        problems[head.letter] = why
    return [problems[head.letter] for head in heads]


def obstacles(yard: Yard, letters: Sequence[LetterHead | DeadLetter]) -> list[str]:
    """Why the requests of answerable letters were not submitted again."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for letter in letters:
        pipeline.xrange(yard.keys.dead, letter.letter, letter.letter)
        pipeline.hget(yard.keys.ledger(letter.client, letter.id), "state")
    found = pipeline.execute(raise_on_error=False)
    return [
        _IN_PROGRESS.get(text_of(state) if isinstance(state, bytes) else "", _OTHER)
        if is_there
        else GONE
        for is_there, state in zip(found[::2], found[1::2], strict=True)
    ]


def drop_letters(yard: Yard, heads: Sequence[LetterHead]) -> list[str]:
    """Delete them; for each "", or that it was gone."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for head in heads:
        pipeline.xdel(yard.keys.dead, head.letter)
    return ["" if deleted else GONE for deleted in pipeline.execute()]


def change_named(yard: Yard, names: Sequence[str], change: Change) -> Changed:
    """Change the letters of these names."""
    changed = Changed()
    for piece in named_heads(yard, list(dict.fromkeys(names))):
        gone = [name for name, head in piece if head is None]
        changed.add(gone, [GONE] * len(gone))
        _change(yard, [head for _, head in piece if head], change, changed)
    return changed


def change_wanted(
    yard: Yard,
    wanted: LetterFilter,
    last: str,
    change: Change,
    within_s: float,
) -> Changed:
    """Change all wanted letters up to ``last``, the oldest first, until the time is over."""
    changed = Changed()
    give_up = clock.monotonic() + within_s
    for piece in all_heads(yard, wanted, last):
        if clock.monotonic() > give_up:
            changed.is_whole = False
            break
        _change(yard, piece, change, changed)
    return changed


def _change(
    yard: Yard,
    heads: Sequence[LetterHead],
    change: Change,
    changed: Changed,
) -> None:
    if heads:
        changed.add([head.letter for head in heads], change(yard, heads))
