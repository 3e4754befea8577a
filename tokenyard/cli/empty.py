"""`tokenyard empty`: cancel the waiting requests."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click
import msgspec
import redis

from tokenyard.admin.intakes import intakes
from tokenyard.cli.shared.auditing import note
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.options import ask_first, yes_option
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.keys import PRIORITY_CLASSES, IntakeClass
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.texts import counted
from tokenyard.protocol.wire import Unanswerable
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import CANCEL_ATTEMPTS, Cancelled, Scripts, cancel, waits_at

ABOUT: Final = """Cancel the requests that wait, those of tenants too; running ones continue.

Each request gets the result `cancelled`, with the tokens published before. Requests that arrive
meanwhile stay. Workers take waiting requests meanwhile: `tokenyard pause` prevents that.

\b
Examples:
  tokenyard empty
  tokenyard empty --class low --yes
  tokenyard empty --class all --yes --json --why "wrong prompts"

`--class all`, the default, includes requests that wait to run again after a crash, whatever their
class. The exit status is 1 if the answer to the question is no, and 2 without a terminal
and without --yes; then nothing is done.
"""
_PAGE: Final = 500
Entries = Sequence[tuple[bytes, Mapping[bytes, bytes]]]


class Emptied(enum.StrEnum):
    """The outcome of an entry."""

    CANCELLED = "cancelled"
    LEFT = "left"  # it was dispatched meanwhile, or had ended before
    NOBODYS = "nobodys"  # it has no client: the coordinator makes it a dead letter


_REST: Final = {
    Emptied.LEFT: "dispatched meanwhile, or ended before",
    Emptied.NOBODYS: "without a client that could be answered; they become dead letters",
}


@click.command(cls=PlainCommand, help=ABOUT, short_help="Cancel waiting requests; asks first.")
@click.option(
    "--class",
    "priority_class",
    type=click.Choice([*PRIORITY_CLASSES, "all"]),
    default="all",
    show_default=True,
    help="Only requests of this priority class.",
)
@click.option("--why", default="", help="Reason, which each result contains.")
@yes_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def empty(ctx: click.Context, priority_class: str, why: str, is_sure: bool, as_json: bool) -> None:
    """Count, ask, cancel page by page, and print the counts."""
    with opened(ctx.obj) as yard:
        # `retry` is last, because rescued requests move there.
        names = [
            (of_class, name)
            for of_class, name in intakes(yard)
            if priority_class in {"all", of_class}
        ]
        total = sum(_length(yard, name) for _, name in names)
        if total:
            verb = "waits" if total == 1 else "wait"
            ask_first(f"Cancel {_requests(total)} that {verb}?", is_sure=is_sure)
        done: dict[IntakeClass, Counter[Emptied]] = {name: Counter() for name, _ in names}
        for of_class, name in names:
            done[of_class] += _empty(yard, name, why)
        count = sum(each[Emptied.CANCELLED] for each in done.values())
        if count:
            text = f"{_requests(count)} cancelled"
            note(yard, "yard.empty", [f"class {priority_class}"], text, why=why)
    cancelled = {name: each[Emptied.CANCELLED] for name, each in done.items()}
    rest = {what: sum(each[what] for each in done.values()) for what in _REST}
    if as_json:
        fields = {what.value: count for what, count in rest.items()}
        say(msgspec.json.encode({"cancelled": cancelled, **fields}))
    else:
        _say(total, cancelled, rest)
    ctx.exit(Exit.OK)


def _say(total: int, cancelled: Mapping[IntakeClass, int], rest: Mapping[Emptied, int]) -> None:
    if not total:
        say("nothing waits")
        return
    parts = ", ".join(f"{count} {name}" for name, count in cancelled.items() if count)
    say(f"{_requests(sum(cancelled.values()))} cancelled{parts and f': {parts}'}")
    for what, count in rest.items():
        if count:
            say(f"{count} left: {_REST[what]}", err=True)


def _requests(count: int) -> str:
    return counted(count, "request")


def _length(yard: Yard, name: str) -> int:
    length: Any = yard.connection.xlen(yard.keys.intake(name))
    return int(length)


def _empty(yard: Yard, name: str, why: str) -> Counter[Emptied]:
    """Cancel the requests that wait in one intake now."""
    scripts = Scripts(yard)
    reason = f"cancelled by an operator: {why}" if why else "cancelled by an operator"
    done: Counter[Emptied] = Counter()
    for entries in _pages(yard.connection, yard.keys.intake(name)):
        for entry, fields in entries:
            done[_cancel(yard.connection, scripts, name, entry.decode(), fields, reason)] += 1
    return done


def _pages(connection: redis.Redis, stream: str) -> Iterator[Entries]:
    """All present entries, the oldest first; later ones are left out."""
    newest: Any = connection.xrevrange(stream, count=1)
    after = "-"
    while newest:
        page: Any = connection.xrange(stream, after, newest[0][0], count=_PAGE)
        if not page:
            return
        yield page
        after = f"({page[-1][0].decode()}"


def _cancel(
    connection: redis.Redis,
    scripts: Scripts,
    name: str,
    entry: str,
    fields: Mapping[bytes, bytes],
    reason: str,
) -> Emptied:
    """Cancel the request of an entry if it still waits there, and only there."""
    request = parse_request(fields)
    if isinstance(request, Unanswerable):
        return Emptied.NOBODYS
    keys = scripts.keys
    for _ in range(CANCEL_ATTEMPTS):
        ledger = keys.ledger(request.client, request.id)
        seen: Any = connection.hmget(ledger, "state", "sid", "intake", "entry")
        if not _waits_here(seen, name, entry):
            return Emptied.LEFT
        call = cancel(
            keys,
            request.client,
            request.id,
            state=(seen[0] or b"").decode(),
            where=name,
            entry="" if seen[0] else entry,
            reason=reason,
        )
        code = scripts.call(call)
        if code is not Cancelled.MOVED:
            return Emptied.CANCELLED if code is Cancelled.CANCELLED else Emptied.LEFT
    return Emptied.LEFT


def _waits_here(seen: Sequence[bytes | None], name: str, entry: str) -> bool:
    """Whether a ledger names this entry; a request by plain XADD has no ledger."""
    state, *place = ((value or b"").decode(errors="replace") for value in seen)
    return not state or (state, *waits_at(*place)) == ("waiting", name, entry)
