"""An action: what an operator can do, with a preview before and an entry in the audit after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenyard.board.yard import Parameters
from tokenyard.ops.operation import Outcome
from tokenyard.protocol.api_keys import Role
from tokenyard.protocol.yard import Yard


@dataclass(frozen=True, slots=True)
class Input:
    """A field that the operator fills in on the page that asks whether to do it."""

    name: str
    label: str
    value: str = ""
    choices: Sequence[str] = ()  # a list to choose from, in place of a text
    hint: str = ""
    kind: str = "text"  # of HTML: text, number, checkbox
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Preview:
    """What would happen, before it does."""

    text: str  # "Drop 17 dead letters. They cannot be brought back."
    inputs: Sequence[Input] = ()
    items: Sequence[str] = ()  # what it would change, as far as it fits
    count: int = 1  # how many it would change; 0: nothing to do


@dataclass(frozen=True, slots=True)
class Action:
    """One action, whose functions run in a thread.

    Errors of redis-py pass; what is not possible is `Refused`.
    """

    name: str  # "request.cancel", in its address and in the audit
    title: str  # "Cancel a request"
    role: Role
    preview: Callable[[Yard, Parameters], Preview]
    run: Callable[[Yard, Parameters], Outcome]
    is_dangerous: bool = False  # its button is red
