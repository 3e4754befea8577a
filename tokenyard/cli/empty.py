"""`tokenyard empty`: cancel what waits."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click
import msgspec
import redis

from tokenyard.cli.shared.confirm import ask_first, yes_option
from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import say
from tokenyard.process.program import Exit, PlainCommand
from tokenyard.protocol.keys import PRIORITY_CLASSES, IntakeClass, Keys
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import Unanswerable
from tokenyard.protocol.wording import counted
from tokenyard.scripts import CANCEL_ATTEMPTS, Cancelled, Scripts, cancel, waits_at

ABOUT: Final = """Cancel what waits in the intakes; what runs goes on.

Each request has its one result, `cancelled`, with the tokens that were published before. What comes
while this runs stays. Workers take what waits meanwhile: `tokenyard pause` keeps them from it.

\b
Examples:
  tokenyard empty
  tokenyard empty --priority low --yes
  tokenyard empty --priority all --yes --json --why "wrong prompts"

`--priority all`, the default, also takes what waits to be run again after a crash, whatever its
priority. The exit status is 1 where the answer to the question is no, and 2 where there is no
terminal to ask on, and no --yes; nothing is done then.
"""
_PAGE: Final = 500
Entries = Sequence[tuple[bytes, Mapping[bytes, bytes]]]


class Emptied(enum.StrEnum):
    """What became of an entry of an intake."""

    CANCELLED = "cancelled"
    LEFT = "left"  # it was dispatched meanwhile, or had its result before
    NOBODYS = "nobodys"  # it names nobody who could be answered: the coordinator buries it


_REST: Final = {
    Emptied.LEFT: "given to workers meanwhile, or known otherwise already",
    Emptied.NOBODYS: "they name nobody who could be answered; the coordinator buries them",
}


@click.command(cls=PlainCommand, help=ABOUT, short_help="Cancel what waits; asks first.")
@click.option(
    "--priority",
    type=click.Choice([*PRIORITY_CLASSES, "all"]),
    default="all",
    show_default=True,
    help="What waits with this priority.",
)
@click.option("--why", default="", help="Why, in words; stands in each result.")
@yes_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def empty(ctx: click.Context, priority: str, why: str, is_sure: bool, as_json: bool) -> None:
    """Count, ask, cancel page by page, and say how many."""
    # What is rescued meanwhile comes to `retry`, so that one is the last.
    every: tuple[IntakeClass, ...] = (*PRIORITY_CLASSES, "retry")
    names = [name for name in every if priority in {"all", name}]
    with opened(ctx.obj) as (connection, keys):
        total = sum(_length(connection, keys, name) for name in names)
        if total:
            verb = "waits" if total == 1 else "wait"
            ask_first(f"Cancel {_requests(total)} that {verb}?", is_sure=is_sure)
        done = {name: _empty(connection, keys, name, why) for name in names}
    cancelled = {name: done[name][Emptied.CANCELLED] for name in names}
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


def _length(connection: redis.Redis, keys: Keys, name: IntakeClass) -> int:
    length: Any = connection.xlen(keys.intake(name))
    return int(length)


def _empty(connection: redis.Redis, keys: Keys, name: IntakeClass, why: str) -> Counter[Emptied]:
    """Cancel what waits in one intake now."""
    scripts = Scripts(connection, keys)
    reason = f"cancelled by an operator: {why}" if why else "cancelled by an operator"
    done: Counter[Emptied] = Counter()
    for entries in _pages(connection, keys.intake(name)):
        for entry, fields in entries:
            done[_cancel(connection, scripts, name, entry.decode(), fields, reason)] += 1
    return done


def _pages(connection: redis.Redis, stream: str) -> Iterator[Entries]:
    """All entries that are there now, the oldest first; what comes later is left alone."""
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
    name: IntakeClass,
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


def _waits_here(seen: Sequence[bytes | None], name: IntakeClass, entry: str) -> bool:
    """Whether a ledger says that its request is this entry; it has none after a plain XADD."""
    state, *place = ((value or b"").decode(errors="replace") for value in seen)
    return not state or (state, *waits_at(*place)) == ("waiting", name, entry)
