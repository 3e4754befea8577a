"""What a front end waits for, in a file, so that the bridge after this one can end it.

Nobody but the engine can end an answer of a front end. A line is ``+`` or ``-`` and the id of a
request that begins or ends; the first is the addresses of the front end, which it tells but once.
The lines outlive this process, not its machine, with which the front end ends as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from gateway.bridge.engine_core import Addresses
from tokenyard import clock
from tokenyard.protocol.errors import SettingsError

#: After this long, what was handed to ZeroMQ is with the front end.
_SENT_S: Final = 1.0
#: Above it the file is written again.
_MOST_BYTES: Final = 1 << 20
_encode: Final = msgspec.json.Encoder().encode
_decode_addresses: Final = msgspec.json.Decoder(Addresses).decode
_decode_id: Final = msgspec.json.Decoder(str).decode


class Journal:
    """The file for one front end, of which one bridge at a time is the engine."""

    def __init__(self, path: Path) -> None:
        """Open it; raises `SettingsError` where another bridge has it."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise SettingsError(
                [f"handshake: another bridge has this front end ({path})"]
            ) from None
        self.addresses: Addresses | None = None
        self.open: set[str] = set()
        self._sent: deque[tuple[float, list[str]]] = deque()
        self._size = 0
        self._read(os.pread(self._file, os.fstat(self._file).st_size, 0))

    def _read(self, text: bytes) -> None:
        first, *lines = text.split(b"\n")
        with contextlib.suppress(msgspec.DecodeError):  # nothing was written yet
            self.addresses = _decode_addresses(first)
            for line in lines[:-1]:  # the last is empty, or was not written to its end
                (self.open.add if line[:1] == b"+" else self.open.discard)(_decode_id(line[1:]))

    def begin(self, addresses: Addresses | None) -> None:
        """Begin for a front end that waits for nothing; None: there is none."""
        self.addresses, self.open = addresses, set()
        self._sent.clear()
        self._rewrite()

    def note_python(self) -> None:
        """It is vLLM's front end in Python."""
        if self.addresses is not None and not self.addresses.is_python:
            self.addresses = msgspec.structs.replace(self.addresses, is_python=True)
            self._rewrite()

    def opened(self, request_id: str) -> None:
        """A front end waits for an answer."""
        self._write_ends(clock.monotonic() - _SENT_S)
        self.open.add(request_id)
        self._append(_line(b"+", request_id))

    def ended(self, request_ids: Iterable[str]) -> None:
        """It has been sent its last.

        That is written a while later, with what begins or ends then: ZeroMQ sends in a thread of
        its own, and a front end ignores the end of what has ended.
        """
        now = clock.monotonic()
        self._sent.append((now, [one for one in request_ids if one in self.open]))
        self._write_ends(now - _SENT_S)

    def _write_ends(self, until: float) -> None:
        """Write the ends of what was sent until then."""
        ids: list[str] = []
        while self._sent and self._sent[0][0] <= until:
            ids += self._sent.popleft()[1]
        self.open.difference_update(ids)
        if self._size > _MOST_BYTES:
            self._rewrite()
        elif ids:
            self._append(b"".join(_line(b"-", one) for one in ids))

    def _rewrite(self) -> None:
        """Killed in the midst of it, the file has the addresses, and some lines too many."""
        self._size = 0
        first = _encode(self.addresses) if self.addresses else b""
        self._append(b"".join([first, b"\n", *(_line(b"+", one) for one in self.open)]))
        os.ftruncate(self._file, self._size)

    def _append(self, lines: bytes) -> None:
        self._size += os.pwrite(self._file, lines, self._size)

    def close(self) -> None:
        """Close it; the next bridge may have it."""
        self._write_ends(math.inf)
        os.close(self._file)


def _line(sign: bytes, request_id: str) -> bytes:
    return sign + _encode(request_id) + b"\n"  # a client may have chosen it


def has_front(path: Path) -> bool:
    """Whether a bridge has met the front end whose journal this is."""
    try:
        return bool(path.read_bytes().partition(b"\n")[0])
    except OSError:
        return False
