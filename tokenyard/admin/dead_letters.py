"""Dead letters: failed requests that are kept whole for operators.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import (
    PRIORITY_CLASSES,
    PriorityClass,
    intake_name,
    split_intake,
)
from tokenyard.protocol.parse import parse_request, unfold
from tokenyard.protocol.streams import position
from tokenyard.protocol.wire import Refused, Request, Unanswerable, unpack_tokens
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts, requeue

_ENTRY: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_MOST: Final = 2**64  # in either part of an entry's id
_PACKED: Final = frozenset({b"tokens", b"published"})
_PAGE: Final = 200


@dataclass(frozen=True, slots=True)
class Letter:
    """What a dead letter says of itself."""

    letter: str  # its entry id, which is its name
    died_ms: int  # unix time
    reason: str
    server_id: str
    client: str  # empty: the entry has no client that could be answered
    id: str
    model: str

    @property
    def is_answerable(self) -> bool:
        """Whether its client is known, so that it can run again."""
        return bool(self.id)

    @property
    def priority_class(self) -> PriorityClass:
        """The class of the intake that it came through."""
        return class_of_sid(self.server_id)


@dataclass(frozen=True, slots=True)
class DeadLetter(Letter):
    """A request that failed and was kept."""

    #: As submitted, with its history; token ids as a list, other binary values as hex.
    fields: Mapping[str, str]

    @property
    def intake(self) -> str:
        """The intake that it goes back to."""
        return intake_name(self.priority_class, self.fields.get("tenant", ""))


def class_of_sid(server_id: str) -> PriorityClass:
    """The class of the intake in a server id, which may be anything."""
    name = split_intake(server_id.partition("/")[0])[0]
    return name if name in PRIORITY_CLASSES else "normal"


def is_letter(name: str) -> bool:
    """Whether a letter may have this name."""
    return bool(_ENTRY.fullmatch(name)) and 0 < max(position(name)) < _MOST


def dead_letters(yard: Yard, most: int = 100) -> list[DeadLetter]:
    """The newest dead letters, the newest first."""
    answer: Any = yard.connection.xrevrange(yard.keys.dead, count=most)
    return [_read(entry, fields) for entry, fields in answer]


def all_letters(yard: Yard) -> Iterator[DeadLetter]:
    """All present letters, the oldest first, page by page; later ones are left out."""
    newest: Any = yard.connection.xrevrange(yard.keys.dead, count=1)
    after = "-"
    while newest:
        last = newest[0][0]
        page: Any = yard.connection.xrange(yard.keys.dead, after, last, count=_PAGE)
        if not page:
            return
        yield from (_read(entry, fields) for entry, fields in page)
        after = f"({page[-1][0].decode()}"


def named_letter(yard: Yard, name: str) -> DeadLetter | None:
    """The letter of this name, which `is_letter`."""
    found: Any = yard.connection.xrange(yard.keys.dead, name, name)
    return _read(*found[0]) if found else None


def find_letter(yard: Yard, name: str) -> DeadLetter | None:
    """The letter of this name, or the newest one of a request with this id."""
    if is_letter(name) and (found := named_letter(yard, name)):
        return found
    letters = [letter for letter in all_letters(yard) if letter.id == name]
    return letters[-1] if letters else None


def requeue_letter(yard: Yard, letter: DeadLetter) -> str:
    """Submit its request again; its new server id.

    Empty if the letter is gone or has no client, or its request is in progress.
    """
    if not letter.is_answerable:
        return ""
    call = requeue(yard.keys, letter.letter, letter.client, letter.id, letter.intake)
    return Scripts(yard).call(call)


def drop_letter(yard: Yard, letter: DeadLetter) -> bool:
    """Delete it; False if it was gone."""
    return bool(yard.connection.xdel(yard.keys.dead, letter.letter))


def _read(entry: bytes, fields: Mapping[bytes, bytes]) -> DeadLetter:
    request = parse_request(fields)
    client, name, model = "", "", ""
    match request:
        case Request():
            client, name, model = request.client, request.id, request.model
        case Refused():
            client, name = request.client, request.id
        case Unanswerable():
            pass
    letter = entry.decode()
    with contextlib.suppress(InvalidRequest):
        fields = unfold(fields)
    return DeadLetter(
        letter=letter,
        died_ms=int(letter.partition("-")[0]),
        reason=text_of(fields.get(b"dead_reason", b"")),
        server_id=text_of(fields.get(b"dead_sid", b"")),
        client=client,
        id=name,
        model=model,
        fields={
            text_of(field): _shown(field, value)
            for field, value in fields.items()
            if not field.startswith(b"dead_")
        },
    )


def _shown(field: bytes, value: bytes) -> str:
    if field in _PACKED and len(value) % 4 == 0 and value[:1] != b"[":
        return ",".join(map(str, unpack_tokens(value)))
    return text_of(value)


def text_of(value: bytes) -> str:
    """A value as text, or in hex where it is none."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()
