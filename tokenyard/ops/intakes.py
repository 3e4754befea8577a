"""What can be done with the intakes: cancel the requests that wait there."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.protocol.keys import IntakeClass, Yard
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.texts import counted
from tokenyard.protocol.wire import Unanswerable
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Cancelled
from tokenyard.scripts.client import cancel, waits_at
from tokenyard.yard.reads import Budget, entries, intake_lengths, intakes

Entry = tuple[str, Mapping[bytes, bytes]]

Class = Annotated[
    Literal["high", "normal", "low", "all"],
    Field("Priority class", "Only requests of this class.", noun="class", flag="--class"),
]


#: What became of an entry.
Emptied = Literal["cancelled", "left", "nobodys"]
_REST: Final[Mapping[str, str]] = {
    "left": "dispatched meanwhile, or ended before",
    "nobodys": "without a client that could be answered; they become dead letters",
}


def _of_class(yard: Yard, name: str) -> list[tuple[IntakeClass, str]]:
    """The intakes of a class; `retry` is last, because rescued requests move there."""
    return [one for one in intakes(yard) if name in {"all", one[0]}]


def _preview(yard: Yard, _caller: Caller, *, priority_class: str = "all") -> Preview:
    total = sum(intake_lengths(yard, [name for _, name in _of_class(yard, priority_class)]))
    waits = f"{counted(total, 'request')} that {'waits' if total == 1 else 'wait'}"
    return Preview(f"Cancel {waits}." if total else "Nothing waits.", count=total, needs_yes=True)


@operation("yard.empty", "Empty the intakes", _preview, is_dangerous=True)
def empty(yard: Yard, caller: Caller, *, priority_class: Class = "all") -> Outcome:
    """Cancel the requests that wait, those of tenants too; running ones continue.

    Each request gets the result `cancelled`, with the tokens published before, and the reason.
    Requests that arrive meanwhile stay. Workers take waiting requests meanwhile: `tokenyard pause`
    prevents that.

    Examples:
      tokenyard empty
      tokenyard empty --class low --yes
      tokenyard empty --class all --yes --json --why "wrong prompts"

    `--class all`, the default, includes requests that wait to run again after a crash, whatever
    their class.
    """
    done: dict[IntakeClass, Counter[str]] = {}
    for of_class, name in _of_class(yard, priority_class):
        done[of_class] = done.get(of_class, Counter()) + _empty(yard, name, caller.why)
    cancelled = {name: each["cancelled"] for name, each in done.items()}
    rest = {what: sum(each[what] for each in done.values()) for what in _REST}
    parts = ", ".join(f"{count} {name}" for name, count in cancelled.items() if count)
    text = f"{counted(sum(cancelled.values()), 'request')} cancelled{parts and f': {parts}'}"
    return Outcome(
        text,
        f"class {priority_class}",
        fields={"cancelled": cancelled, **rest},
        notes=[f"{count} left: {_REST[what]}" for what, count in rest.items() if count],
    )


def _empty(yard: Yard, name: str, why: str) -> Counter[str]:
    """Cancel the requests that wait in one intake now."""
    scripts = Scripts(yard)
    reason = f"cancelled by an operator: {why}" if why else "cancelled by an operator"
    return Counter(_cancel(yard, scripts, name, one, reason) for one in _entries(yard, name))


def _entries(yard: Yard, name: str) -> Iterator[Entry]:
    """All present entries, the oldest first; later ones are left out."""
    stream = yard.keys.intake(name)
    newest: Any = yard.connection.xrevrange(stream, count=1)
    if newest:
        last = newest[0][0].decode()
        yield from entries(yard.connection, stream, Budget(sys.maxsize), high=last)


def _cancel(yard: Yard, scripts: Scripts, name: str, found: Entry, reason: str) -> Emptied:
    """Cancel the request of an entry if it still waits there, and only there."""
    entry, request = found[0], parse_request(found[1])
    if isinstance(request, Unanswerable):
        return "nobodys"
    ledger = yard.keys.ledger(request.client, request.id)
    seen: Any = yard.connection.hmget(ledger, "state", "sid", "intake", "entry")
    if not _waits_here(seen, name, entry):
        return "left"
    call = cancel(
        yard.keys,
        request.client,
        request.id,
        state=(seen[0] or b"").decode(),
        where=name,
        entry="" if seen[0] else entry,
        reason=reason,
    )
    # One that has moved since is not here any more: a request comes back under another entry.
    return "cancelled" if scripts.call(call) is Cancelled.CANCELLED else "left"


def _waits_here(seen: Sequence[bytes | None], name: str, entry: str) -> bool:
    """Whether a ledger names this entry; a request by plain XADD has no ledger."""
    state, *place = ((value or b"").decode(errors="replace") for value in seen)
    return not state or (state, *waits_at(*place)) == ("waiting", name, entry)


OPERATIONS: Final[tuple[Operation, ...]] = (empty,)
