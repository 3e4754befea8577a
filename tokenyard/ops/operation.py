"""An operation as data, how it is carried out, and how the values of its parameters are read."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, Unpack, get_args, get_origin, get_type_hints

import redis

from tokenyard.ops.audit import COMMAND_LINE, AuditEntry, record
from tokenyard.ops.control import Unacknowledged
from tokenyard.protocol.api_keys import Role
from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.keys import Yard

#: What a parameter names, where that is something of the yard.
Noun = Literal[
    "", "scope", "model", "worker", "tenant", "key", "letter", "batch", "request", "class"
]
#: Largest whole number that JSON keeps everywhere.
MOST_WHOLE: Final = 2**53
#: A default: the empty value of the type.
_EMPTY: Final = object()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who carries out an operation, and why."""

    name: str  # "local", a key's id and name, or user@host
    role: str  # at the board; `tokenyard.ops.audit.COMMAND_LINE`
    why: str = ""

    @property
    def operator(self) -> str:
        """The operator as orders to workers name it: ``olga@board``, ``kim@north``."""
        return self.name if self.role == COMMAND_LINE else f"{self.name}@board"


@dataclass(frozen=True, slots=True)
class Field:
    """What a type does not say of a parameter."""

    label: str = ""  # on a form; "": the page that leads there gives the value
    hint: str = ""  # below the field, and the help of the option
    noun: Noun = ""
    flag: str = ""  # its option, where that has another name
    least: float = 0
    most: float = MOST_WHOLE
    may_be_empty: bool = False  # "" is a value of its own
    is_fixed: bool = False  # what the page gives cannot be changed on the form
    is_hidden: bool = False  # only the form has it, unseen
    is_secret: bool = False  # not for the audit


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operation."""

    name: str
    type: type  # str, int, float, bool; list: words with commas; tuple: one or more texts
    default: Any  # `inspect.Parameter.empty`: it must be given
    choices: Sequence[str]  # of a Literal
    field: Field

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return self.field.flag or f"--{self.name.replace('_', '-')}"

    def read(self, texts: Sequence[str]) -> Any:
        """The value of what a form has sent; raises `BadInput`."""
        given = [text for text in texts if text]
        if self.type is tuple and given:
            return tuple(dict.fromkeys(given))
        text = given[0] if given else ""
        if self.type is bool:
            return text == "on"
        if not text and not self.field.may_be_empty:
            if self.is_required:
                raise BadInput(f"{self.name}: give it", self.name)
            return self.default
        if self.choices and text not in self.choices:
            raise BadInput(f"{self.name}: give one of {', '.join(self.choices)}", self.name)
        if self.type is list:
            return [word for part in ",".join(given).split(",") if (word := part.strip())]
        return self._number(text) if self.type in {int, float} else text

    def _number(self, text: str) -> float:
        """The number of a text, which may have commas."""
        least, most = self.field.least, self.field.most
        digits = text.replace(",", "")
        kind = "whole number" if self.type is int else "number"
        if re.fullmatch(r"[0-9]{1,16}" if self.type is int else r"[0-9.]{1,16}", digits):
            with contextlib.suppress(ValueError):
                number: float = self.type(digits)
                if least <= number <= most:
                    return number
        bounds = f"from {least:g} to {most:g}" if most < MOST_WHOLE else f"of at least {least:g}"
        raise BadInput(f"{self.name}: give a {kind} {bounds}, not {text[:50]!r}", self.name)


@dataclass(frozen=True, slots=True)
class Preview:
    """What would happen, before it does."""

    text: str  # "Drop 17 dead letters. They cannot be brought back."
    items: Sequence[str] = ()  # what it would change, as far as it fits
    count: int = 1  # how many it would change; 0: nothing to do
    needs_yes: bool = False  # the command line asks first, too
    values: Mapping[str, Any] = field(default_factory=dict)  # that the form begins with


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has happened."""

    text: str  # "17 dead letters dropped"
    target: str  # what it was done to, for the audit: "dead letters of llama-8b"
    secret: str = ""  # shown once, and never kept
    details: Mapping[str, str] = field(default_factory=dict)  # for the audit, beside the parameters
    fields: Mapping[str, Any] = field(default_factory=dict)  # for programs, as JSON
    notes: Sequence[str] = ()  # what else to know, a line each
    is_partial: bool = False  # some of it was not done, as the text says
    done: str = ""  # in place of ``text`` once all workers have obeyed
    #: Waits for that for so many seconds; the workers that have not obeyed.
    wait: Callable[[float], Sequence[Unacknowledged]] | None = None

    @property
    def told(self) -> str:
        """All of it in sentences, for the board and the audit."""
        return f"{'. '.join([self.text, *self.notes]).rstrip('.')}."


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. Errors of redis-py pass; what is not possible is `Refused`."""

    name: str  # "signal.pause", in the audit and in the board's address
    title: str  # "Pause"
    role: Role  # that the board asks for
    parameters: Sequence[Parameter]
    run: Callable[..., Outcome]  # (yard, caller, *, parameters)
    preview: Callable[..., Preview]  # the same
    is_dangerous: bool  # its button is red
    is_long: bool  # it waits for workers: a page does not

    def target(self, values: Mapping[str, Any]) -> str:
        """What it is done to, by the names that were given: ``model adder``."""
        named = (one for one in self.parameters if one.field.noun and not one.field.is_secret)
        return ", ".join(
            f"{one.field.noun} {_text(values[one.name])}" for one in named if values.get(one.name)
        )

    def details(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        """What the audit says of the values that were given, beside the defaults."""
        return {
            one.name: _text(values[one.name])
            for one in self.parameters
            if not one.field.is_secret and values.get(one.name, one.default) != one.default
        }


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, (list, tuple)) else str(value)


def operation(
    name: str,
    title: str,
    preview: Callable[..., Preview],
    *,
    role: Role = "operator",
    is_dangerous: bool = False,
    is_long: bool = False,
) -> Callable[[Callable[..., Outcome]], Operation]:
    """Make an operation of a function whose keyword-only parameters are annotated with `Field`.

    Those of a ``TypedDict`` that it unpacks may be left out: they are empty then.
    """

    def made(run: Callable[..., Outcome]) -> Operation:
        hints = get_type_hints(run, include_extras=True)
        parameters: list[Parameter] = []
        for one in inspect.signature(run).parameters.values():
            hint = hints[one.name]
            if one.kind is inspect.Parameter.KEYWORD_ONLY:
                parameters.append(_parameter(one.name, hint, one.default))
            elif get_origin(hint) is Unpack:
                fields = get_type_hints(get_args(hint)[0], include_extras=True)
                parameters += [_parameter(name, field) for name, field in fields.items()]
        return Operation(name, title, role, parameters, run, preview, is_dangerous, is_long)

    return made


def _parameter(name: str, hint: Any, default: Any = _EMPTY) -> Parameter:
    kind, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    may_be_none = type(None) in get_args(kind)
    if may_be_none:
        kind = next(one for one in get_args(kind) if one is not type(None))
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    kind = str if choices else get_origin(kind) or kind  # list[str] is a list
    if default is _EMPTY:
        default = None if may_be_none else kind()
    described = next((one for one in more if isinstance(one, Field)), Field())
    return Parameter(name, kind, default, choices, described)


@dataclass(frozen=True, slots=True)
class Done:
    """An operation that was carried out."""

    outcome: Outcome
    entry: str = ""  # in the audit
    unrecorded: str = ""  # why it is not there


def carry_out(yard: Yard, op: Operation, caller: Caller, values: Mapping[str, Any]) -> Done:
    """Do it and record it, also where it is refused or breaks in the middle.

    Raises `BadInput` before anything is tried, `Refused`, and what the operation raises.
    """
    entry = entry_of(op, caller, values)
    try:
        outcome = op.run(yard, caller, **values)
    except BadInput:
        raise
    except BaseException as error:  # somebody may interrupt it in the middle, too
        record_done(yard, replace(entry, error=str(error) or type(error).__name__))
        raise
    details = {**entry.details, **outcome.details}
    found, why = record_done(
        yard, replace(entry, target=outcome.target, text=outcome.told, details=details)
    )
    return Done(outcome, found, why)


def entry_of(op: Operation, caller: Caller, values: Mapping[str, Any]) -> AuditEntry:
    """What the audit says of an operation before it has an outcome."""
    return AuditEntry(
        who=caller.name,
        role=caller.role,
        action=op.name,
        target=op.target(values),
        why=caller.why,
        details=op.details(values),
    )


def record_done(yard: Yard, entry: AuditEntry) -> tuple[str, str]:
    """The id of the entry, or why it could not be written: what was done is done all the same."""
    try:
        return record(yard, entry), ""
    except redis.RedisError as error:
        return "", str(error)
