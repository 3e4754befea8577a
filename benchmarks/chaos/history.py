"""The events of a chaos run, in files with one JSON object per line.

There are three sources: the clients (what they asked and saw), the injector (what it broke), and,
after the run, the broker's append-only file (`benchmarks.chaos.record`), which has every write in
order. Times are seconds since the epoch by the machine's clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

#: The error code of a request whose entry was deleted.
ENTRY_LOST: Final = "ENTRY_LOST"
#: See `benchmarks.chaos.check`.
ViolationKind = Literal["lost", "twice", "wrong", "gap", "repeat", "status", "tenant", "count"]
#: A request: its client and its id.
Key = tuple[str, str]


class Born(Struct, frozen=True, tag=True):
    """A client process has started, perhaps to replace a killed one."""

    at: float
    client: str


class OfRequest(Struct, frozen=True):
    """An event of one request."""

    at: float
    client: str
    id: str


class Asked(OfRequest, frozen=True, tag=True, omit_defaults=True):
    """A client is about to submit a request."""

    max_tokens: int
    stream: bool
    tokens: list[int] | None = None  # the prompt: token ids or text
    text: str | None = None
    seed: int | None = None
    ignore_eos: bool = False
    key: str = ""  # its `Idempotency-Key`, if it goes over HTTP
    tenant: str = ""


class Accepted(OfRequest, frozen=True, tag=True):
    """The broker has acknowledged a request."""


class CancelAsked(OfRequest, frozen=True, tag=True):
    """A client is about to cancel."""


class Seen(Struct, frozen=True, tag=True, omit_defaults=True):
    """A reader got a delta; ``reader`` distinguishes several readers of one request."""

    at: float
    reader: str
    client: str
    id: str
    seq: int
    tokens: list[int]
    text: str | None = None


class Ended(Struct, frozen=True, tag=True, omit_defaults=True):
    """A reader got the result.

    ``seq`` is None for readers that got the result's last tokens as a delta.
    """

    at: float
    reader: str
    client: str
    id: str
    status: str
    tokens: list[int]
    seq: int | None = None
    text: str | None = None
    code: str = ""


class Trouble(OfRequest, frozen=True, tag=True):
    """A client met an error that it could handle."""

    error: str


class Resumed(OfRequest, frozen=True, tag=True):
    """A stream over HTTP went on behind the last event that had come."""

    hints: int  # to come back that earlier connections ended with


class Broken(OfRequest, frozen=True, tag=True):
    """A gateway gave an answer that breaks a promise."""

    kind: ViolationKind
    what: str


class Fault(Struct, frozen=True, tag=True):
    """The injector hit processes; ``kind`` is for example ``worker kill``."""

    at: float
    kind: str
    target: str
    pids: list[int]
    orphans: list[int] = []  # worker processes of a controller that was hit


class Missed(Struct, frozen=True, tag=True):
    """A scheduled fault found no target."""

    at: float
    kind: str


class Trimmed(OfRequest, frozen=True, tag=True):
    """The injector deleted a request's entry from an intake."""


class Joined(Struct, frozen=True, tag=True):
    """A worker, which runs in this process, joined the roster (broker's record)."""

    worker: str
    pid: int


class Moved(OfRequest, frozen=True, tag=True):
    """A request entered an intake or a lane (broker's record)."""

    place: str  # intake:<class>, intake:<class>:<tenant> or lane:<worker>
    tenant: str = ""  # by its entry


class Charged(Struct, frozen=True, tag=True):
    """A request was charged to a tenant (broker's record)."""

    client: str
    id: str
    tenant: str
    amount: float = 0.0  # weighted tokens by the tenant's weight


class Paid(Struct, frozen=True, tag=True):
    """What a request has used that was cancelled while it ran (broker's record).

    First an estimate of its prompt and the published tokens, then what its worker says.
    """

    client: str
    id: str
    input: int
    output: int


class Lifted(Struct, frozen=True, tag=True):
    """The service of a tenant that came back to the line was raised (broker's record)."""

    tenant: str


class Published(OfRequest, frozen=True, tag=True, omit_defaults=True):
    """A delta or a result was published (broker's record)."""

    event: str  # delta or result
    seq: int
    tokens: list[int]
    status: str = ""
    worker: str = ""  # that made the result
    place: str = ""  # reply (the request's own stream) or replies (its client's)
    prompt_tokens: int | None = None  # by the usage in a result; those of scripts have none
    code: str = ""  # of the error of a result


Event = (
    Born
    | Asked
    | Accepted
    | CancelAsked
    | Seen
    | Ended
    | Trouble
    | Resumed
    | Broken
    | Fault
    | Missed
    | Trimmed
    | Joined
    | Moved
    | Charged
    | Paid
    | Lifted
    | Published
)
_decoder: Final = msgspec.json.Decoder(Event)
_encode: Final = msgspec.json.Encoder().encode


def now() -> float:
    """Seconds since the epoch."""
    return round(time.time(), 4)


class HistoryWriter:
    """Appends events to a file unbuffered, so that a killed writer loses none; thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, *events: Event) -> None:
        """Append events."""
        lines = b"".join(_encode(event) + b"\n" for event in events)
        with self._lock:
            self._file.write(lines)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def read_history(paths: Iterable[Path]) -> Iterator[Event]:
    """Read the events of several files in turn, without incomplete last lines."""
    for path in paths:
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield _decoder.decode(line)


def inheritance(path: Path) -> tuple[int, list[Asked]]:
    """The number of earlier lives of a client, and its accepted requests without an answer."""
    lives, asked, due = 0, {}, set()
    for event in read_history([path]):
        match event:
            case Born():
                lives += 1
            case Asked():
                asked[event.id] = event
            case Accepted():
                due.add(event.id)
            case Ended() | Broken():
                due.discard(event.id)
    return lives, [asked[request_id] for request_id in due]
