"""Dead letters: failed requests that are kept whole for operators.

A letter may have some MiB, so each read is bounded in letters and by the size of the letters before
it. Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenyard import clock
from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.keys import PRIORITY_CLASSES, Yard, intake_name, split_intake
from tokenyard.protocol.parse import parse_owner, unfold
from tokenyard.protocol.streams import position, whole
from tokenyard.protocol.wire import unpack_tokens
from tokenyard.yard.reads import Fields, is_entry, pages

_PACKED: Final = frozenset({b"tokens", b"published"})
#: What the reasons of requests that were given up begin with.
CODES: Final[tuple[str, ...]] = (
    Code.POISONED,
    Code.INFERENCE_ERROR,
    Code.WORKER_LOST,
    Code.ID_REUSED,
)
#: In a filter: letters whose reason has no code, like entries that name no client.
NO_CODE: Final = "other"
#: Letters in the first read, and in any.
_FIRST: Final = 20
_MOST: Final = 200
#: About so much is read at once.
_PIECE_BYTES: Final = 4 * 1024 * 1024
#: Most letters that a page of a filtered list looks at, and about the bytes.
LOOKED_AT: Final = 2_000
_LOOKED_AT_BYTES: Final = 32 * 1024 * 1024
_NEWEST: Final = str(2**64 - 1)  # ms: no entry is newer


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A failed request that is kept, without its content."""

    letter: str  # its entry id, which is its name
    died_ms: int  # unix time
    reason: str
    server_id: str
    client: str  # empty: the entry has no client that could be answered
    id: str
    model: str
    tenant: str = ""
    crashes: int = 0  # workers that were lost with it
    faults: int = 0  # times that an engine could not serve it
    size: int = 0  # bytes of its fields

    @property
    def is_answerable(self) -> bool:
        """Whether its client is known, so that it can run again."""
        return bool(self.id)

    @property
    def code(self) -> str:
        """The code of its reason; "" where it has none."""
        code = self.reason.partition(":")[0]
        return code if code in CODES else ""

    @property
    def why(self) -> str:
        """Its reason without the code."""
        return self.reason.removeprefix(f"{self.code}: ")

    @property
    def intake(self) -> str:
        """The intake that it goes back to: of its tenant, and of the class that it came with."""
        name = split_intake(self.server_id.partition("/")[0])[0]
        return intake_name(name if name in PRIORITY_CLASSES else "normal", self.tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLetter(DeadLetter):
    """A dead letter with all its fields."""

    #: As submitted, with its history; token ids as a list, other binary values as hex.
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which letters are wanted. Whatever is empty or 0 allows all."""

    code: str = ""  # one of `CODES`, or `NO_CODE`
    model: str = ""
    client: str = ""
    tenant: str = ""
    text: str = ""  # anywhere in the reason or the request's id, in upper or lower case
    since_ms: int = 0
    until_ms: int = 0

    @property
    def is_all(self) -> bool:
        """Whether it allows every letter."""
        return self == LetterFilter()

    def fits(self, head: DeadLetter) -> bool:
        """Whether a letter is wanted; its time is not looked at, since reads are bounded by it."""
        text = self.text.casefold()
        return (
            (self.code or head.code or NO_CODE) == (head.code or NO_CODE)
            and self.model in {"", head.model}
            and self.client in {"", head.client}
            and self.tenant in {"", head.tenant}
            and (not text or text in head.reason.casefold() or text in head.id.casefold())
        )

    def bounds(self, last: str = "") -> tuple[str, str]:
        """The first and the last entry id that it allows, up to ``last``."""
        newest = str(self.until_ms or _NEWEST)
        if last and position(last.removeprefix("(")) <= (int(newest), 2**64):
            newest = last
        return str(self.since_ms), newest


@dataclass(frozen=True, slots=True)
class LetterPage:
    """A part of a list of letters, the newest first."""

    heads: Sequence[DeadLetter]
    looked_at: int  # letters, with those that the filter left out
    older: str = ""  # the list continues after this letter; "": this was all


@dataclass(frozen=True, slots=True)
class Counted:
    """How many letters there are."""

    count: int
    first: Sequence[DeadLetter]  # some of the oldest
    is_whole: bool = True  # False: the time was over, and there may be more


def read_page(yard: Yard, wanted: LetterFilter, *, before: str = "", most: int = 50) -> LetterPage:
    """The newest wanted letters, all older than ``before``.

    It ends early, with `LetterPage.older`, where the filter leaves too many out.
    """
    oldest, newest = wanted.bounds(f"({before}" if is_entry(before) else "")
    heads: list[DeadLetter] = []
    looked_at = size = 0
    at_once = most + 1 if wanted.is_all else _MOST
    for piece in _pieces(yard, newest, oldest, at_once=at_once, newest_first=True):
        for head in piece:
            if wanted.fits(head):
                if len(heads) == most:
                    return LetterPage(heads, looked_at, heads[-1].letter)
                heads.append(head)
            looked_at += 1
            size += head.size
        if looked_at >= LOOKED_AT or size >= _LOOKED_AT_BYTES:
            return LetterPage(heads, looked_at, piece[-1].letter)
    return LetterPage(heads, looked_at)


def all_heads(yard: Yard, wanted: LetterFilter, last: str) -> Iterator[list[DeadLetter]]:
    """The wanted letters up to the letter ``last``, the oldest first; a piece may be empty."""
    oldest, newest = wanted.bounds(last)
    for piece in _pieces(yard, oldest, newest, at_once=_MOST, newest_first=False):
        yield [head for head in piece if wanted.fits(head)]


def count_letters(yard: Yard, wanted: LetterFilter, last: str, within_s: float) -> Counted:
    """Count the wanted letters up to ``last``."""
    give_up = clock.monotonic() + within_s
    count, first = 0, list[DeadLetter]()
    for piece in all_heads(yard, wanted, last):
        count += len(piece)
        first += piece[: _FIRST - len(first)]
        if wanted.is_all and newest_letter(yard) == last:
            total: Any = yard.connection.xlen(yard.keys.dead)
            return Counted(total, first)
        if clock.monotonic() > give_up:
            return Counted(count, first, is_whole=False)
    return Counted(count, first)


def newest_letter(yard: Yard) -> str:
    """The name of the newest letter; "" where there is none."""
    found: Any = yard.connection.xrevrange(yard.keys.dead, count=1)
    return found[0][0].decode() if found else ""


def named_heads(yard: Yard, names: Sequence[str]) -> Iterator[list[tuple[str, DeadLetter | None]]]:
    """The letters of these names, in pieces; None for one that is gone."""
    for piece in pages(names, _FIRST):
        pipeline: Any = yard.connection.pipeline(transaction=False)
        known = [name for name in piece if is_entry(name)]
        for name in known:
            pipeline.xrange(yard.keys.dead, name, name)
        answers = zip(known, pipeline.execute(), strict=True)
        found = {name: _head(*answer[0]) for name, answer in answers if answer}
        yield [(name, found.get(name)) for name in piece]


def _pieces(
    yard: Yard, first: str, last: str, *, at_once: int, newest_first: bool
) -> Iterator[list[DeadLetter]]:
    """The letters between two, in pieces whose size follows from that of the letters before."""
    ask: Any = yard.connection.xrevrange if newest_first else yard.connection.xrange
    count = min(_FIRST, at_once)
    while piece := ask(yard.keys.dead, first, last, count=count):
        heads = [_head(entry, fields) for entry, fields in piece]
        yield heads
        if len(piece) < count:
            return
        first = f"({heads[-1].letter}"
        mean = max(1, sum(head.size for head in heads) // len(heads))
        count = max(1, min(at_once, _PIECE_BYTES // mean))


def dead_letters(yard: Yard, most: int = 100) -> list[WholeLetter]:
    """The newest dead letters, the newest first."""
    answer: Any = yard.connection.xrevrange(yard.keys.dead, count=most)
    return [_whole(entry, fields) for entry, fields in answer]


def named_letter(yard: Yard, name: str) -> WholeLetter | None:
    """The letter of this name, which `is_entry`."""
    found: Any = yard.connection.xrange(yard.keys.dead, name, name)
    return _whole(*found[0]) if found else None


def find_letter(yard: Yard, name: str) -> WholeLetter | None:
    """The letter of this name, or the newest one of a request with this id."""
    if is_entry(name) and (found := named_letter(yard, name)):
        return found
    for piece in _pieces(yard, "+", "-", at_once=_MOST, newest_first=True):
        for one in piece:
            if one.id == name:
                return named_letter(yard, one.letter)
    return None


def _head(entry: bytes, fields: Fields) -> DeadLetter:
    return DeadLetter(**_described(entry, fields))


def _whole(entry: bytes, fields: Fields) -> WholeLetter:
    shown = {
        text_of(field): _shown(field, value)
        for field, value in _unfolded(fields).items()
        if not field.startswith(b"dead_")
    }
    return WholeLetter(**_described(entry, fields), fields=shown)


def _described(entry: bytes, fields: Fields) -> dict[str, Any]:
    """What the fields of an entry say of its letter."""
    client, name = parse_owner(fields) or ("", "")
    found, letter = _unfolded(fields), entry.decode()
    return {
        "letter": letter,
        "died_ms": position(letter)[0],
        "reason": text_of(found.get(b"dead_reason", b"")),
        "server_id": text_of(found.get(b"dead_sid", b"")),
        "client": client,
        "id": name,
        "model": text_of(found.get(b"model", b"")),
        "tenant": text_of(found.get(b"tenant", b"")),
        "crashes": whole(found.get(b"crashes")),
        "faults": whole(found.get(b"faults")),
        "size": sum(map(len, fields.values())),
    }


def _unfolded(fields: Fields) -> Fields:
    with contextlib.suppress(InvalidRequest):
        return unfold(fields)
    return fields


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
