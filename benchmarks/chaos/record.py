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

from benchmarks.chaos.history import Charged, Event, Joined, Key, Lifted, Moved, Paid, Published
from tokenyard.protocol.keys import Keys, is_intake
from tokenyard.protocol.parse import unfold
from tokenyard.protocol.replies import Provenance, Reply, Usage, code_of, decode_replies
from tokenyard.protocol.wire import DEFAULT_CLIENT, unpack_tokens
from tokenyard.protocol.worker_info import decode_worker

Command = Sequence[bytes]
_CHUNK: Final = 1 << 20
_ENTRY_ID: Final = re.compile(rb"\d+-\d+")
_provenance: Final = msgspec.json.Decoder(Provenance)
_usage: Final = msgspec.json.Decoder(Usage)


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
        elif name == b"HSET" and b"charge" in command[2::2]:
            yield from prefixes.charged(command)
        elif name == b"HSET" and b"used" in command[2::2]:
            yield from prefixes.paid(command)
        elif name == b"HINCRBY" and command[2] == b"lifted":
            yield from prefixes.lifted(command)


class _Prefixes:
    """Identifies the streams of a yard by their keys."""

    def __init__(self, keys: Keys) -> None:
        self.workers = keys.workers.encode()
        self._intake = keys.intake("").encode()
        self._tenant = keys.tenant("").encode()
        self._ledger = keys.ledger("", "").encode().removesuffix(b"/")
        self._lane = keys.lane("").encode()
        self._replies = keys.replies("").encode()
        self._reply = keys.reply("", "").encode().removesuffix(b"/")
        # The clients of requests that are answered on a stream of several, by stream and id.
        self._clients: dict[tuple[str, str], str] = {}

    def added(self, command: Command) -> Iterator[Event]:
        """The events in an added stream entry."""
        key = command[1]
        at, fields = _entry(command)
        intake = key.removeprefix(self._intake).decode()
        if key.startswith(self._intake) and is_intake(intake):
            client, request = request_of(fields)
            reply_to = unfold(fields).get(b"reply_to", b"").decode()
            if reply_to not in ("", f"replies:{client}"):
                self._clients[reply_to.removeprefix("replies:"), request] = client
            yield Moved(at, client, request, f"intake:{intake}", _tenant(fields))
        elif key.startswith(self._lane) and b"id" in fields:
            lane = key.removeprefix(self._lane).decode()
            yield Moved(at, *request_of(fields), f"lane:{lane}", _tenant(fields))
        elif key.startswith(self._replies):
            stream = key.removeprefix(self._replies).decode()
            for reply in decode_replies(fields):
                client = self._clients.get((stream, reply.id), stream)
                yield from _published(at, client, reply, "replies")
        elif key.startswith(self._reply):
            client, _, _ = key.removeprefix(self._reply).decode().partition("/")
            for reply in decode_replies(fields):
                yield from _published(at, client, reply, "reply")

    def charged(self, command: Command) -> Iterator[Event]:
        """The event in a charge that was written to a ledger."""
        if command[1].startswith(self._ledger):
            key, fields = self._written(command)
            amount, _, _, tenant, *_ = fields[b"charge"].decode().split(" ")
            yield Charged(*key, tenant, float(amount))

    def paid(self, command: Command) -> Iterator[Event]:
        """The event in what a cancelled request has used by its ledger."""
        if command[1].startswith(self._ledger):
            key, fields = self._written(command)
            yield Paid(*key, *map(int, fields[b"used"].split()))

    def _written(self, command: Command) -> tuple[Key, dict[bytes, bytes]]:
        """The request of a ledger, and the fields that were written to that."""
        client, _, request = command[1].removeprefix(self._ledger).decode().partition("/")
        return (client, request), dict(zip(command[2::2], command[3::2], strict=True))

    def lifted(self, command: Command) -> Iterator[Event]:
        """The event in a counter of a tenant that was increased."""
        if command[1].startswith(self._tenant):
            yield Lifted(command[1].removeprefix(self._tenant).decode())


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


def _tenant(fields: Mapping[bytes, bytes]) -> str:
    return unfold(fields).get(b"tenant", b"").decode()


def _published(at: float, client: str, reply: Reply, place: str) -> Iterator[Published]:
    if reply.event == "delta" and reply.error:
        return  # of another request with its id
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
        _usage.decode(reply.usage).prompt_tokens if reply.usage else None,
        code_of(reply),
    )


def _worker(reply: Reply) -> str:
    return _provenance.decode(reply.provenance).worker if reply.provenance else ""
