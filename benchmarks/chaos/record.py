"""Reads the broker's append-only file, which is never rewritten in a chaos run.

The file has every write in order of effect, including entries that clients have deleted. So the
checker sees every duplicate result, and every token from a worker without a lease.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import hiredis
import msgspec

from benchmarks.chaos.history import Event, Joined, Key, Moved, Published
from tokenyard.protocol.keys import INTAKE_CLASSES, Keys
from tokenyard.protocol.parse import unfold
from tokenyard.protocol.replies import Provenance, Reply, decode_replies
from tokenyard.protocol.wire import DEFAULT_CLIENT, unpack_tokens
from tokenyard.protocol.worker_info import decode_worker

Command = Sequence[bytes]
_CHUNK: Final = 1 << 20
_ENTRY_ID: Final = re.compile(rb"\d+-\d+")
_provenance: Final = msgspec.json.Decoder(Provenance)


def read_commands(data_dir: Path) -> Iterator[Command]:
    """The commands in the append-only files of a server, oldest first."""
    files = data_dir.glob("appendonlydir/*.incr.aof")
    for path in sorted(files, key=lambda one: int(one.name.split(".")[-3])):
        reader = hiredis.Reader()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                reader.feed(chunk)
                while (command := reader.gets()) is not False:
                    yield command


def record(commands: Iterator[Command], keys: Keys) -> Iterator[Event]:
    """The events of requests in the commands, in order."""
    prefixes = _Prefixes(keys)
    for command in commands:
        name = command[0].upper()
        if name == b"XADD":
            yield from prefixes.added(command)
        elif name == b"HSET" and command[1] == prefixes.workers:
            for worker, packed in zip(command[2::2], command[3::2], strict=True):
                yield Joined(worker.decode(), decode_worker(packed).pid)


class _Prefixes:
    """Identifies the streams of a yard by their keys."""

    def __init__(self, keys: Keys) -> None:
        self.workers = keys.workers.encode()
        self._intakes = {keys.intake(name).encode(): name for name in INTAKE_CLASSES}
        self._lane = keys.lane("").encode()
        self._replies = keys.replies("").encode()
        self._reply = keys.reply("", "").encode().removesuffix(b"/")

    def added(self, command: Command) -> Iterator[Event]:
        """The events in an added stream entry."""
        key = command[1]
        at, fields = _entry(command)
        if key in self._intakes:
            yield Moved(at, *request_of(fields), f"intake:{self._intakes[key]}")
        elif key.startswith(self._lane) and b"id" in fields:
            yield Moved(at, *request_of(fields), f"lane:{key.removeprefix(self._lane).decode()}")
        elif key.startswith(self._replies):
            yield from _published(at, key.removeprefix(self._replies).decode(), fields, "replies")
        elif key.startswith(self._reply) and b"w" not in fields:  # which wakes a gateway's reader
            client, _, _ = key.removeprefix(self._reply).decode().partition("/")
            yield from _published(at, client, fields, "reply")


def _entry(command: Command) -> tuple[float, dict[bytes, bytes]]:
    """Time and fields of an XADD, whose entry id follows its options."""
    place = next(n for n in range(2, len(command)) if _ENTRY_ID.fullmatch(command[n]))
    at = int(command[place].partition(b"-")[0]) / 1000
    values = command[place + 1 :]
    return at, dict(zip(values[::2], values[1::2], strict=True))


def request_of(fields: Mapping[bytes, bytes]) -> Key:
    """The request of an entry of an intake or lane."""
    fields = unfold(fields)
    client = fields.get(b"client", b"").decode() or DEFAULT_CLIENT
    return client, fields.get(b"id", b"").decode()


def _published(
    at: float, client: str, fields: dict[bytes, bytes], place: str
) -> Iterator[Published]:
    for reply in decode_replies(fields):
        yield Published(
            at,
            client,
            reply.id,
            reply.event,
            reply.seq,
            unpack_tokens(reply.tokens),
            reply.status or "",
            _worker(reply),
            place,
        )


def _worker(reply: Reply) -> str:
    return _provenance.decode(reply.provenance).worker if reply.provenance else ""
