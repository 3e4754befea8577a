"""Reads a multipart form with one file, which goes to the store piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Receive

from gateway.batches.files import MAX_FILENAME, FileStore, NewFile, StoredFile
from gateway.batches.records import LIFETIMES_S
from gateway.http.errors import GatewayError

#: Bytes that are gathered before they are written.
_PIECE: Final = 1024 * 1024
#: Bytes of one field that is not the file, and how many parts a form may have.
_MOST_FIELD: Final = 4096
_MOST_PARTS: Final = 16
#: Bytes of a form beside its file: boundaries, headers, fields.
_FORM_BYTES: Final = 128 * 1024
_LONGEST_LENGTH: Final = 20
#: `batch` for lines, the others for media of requests.
_PURPOSES: Final = ("batch", "user_data", "vision")
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_FIELDS: Final = frozenset({"purpose", _ANCHOR, _SECONDS})


def expected_bytes(headers: Headers, limit: int) -> int:
    """The most bytes of a file that a form may bring; raises `GatewayError`."""
    length = headers.get("content-length", str(limit))
    is_number = length.isascii() and length.isdecimal() and len(length) < _LONGEST_LENGTH
    if not is_number or int(length) > limit + _FORM_BYTES:
        raise _too_large(limit)
    return min(int(length), limit)


async def receive_upload(
    headers: Headers, receive: Receive, store: FileStore, tenant: str, limit: int
) -> StoredFile:
    """Store the file of a form; raises `GatewayError`, and then nothing is left."""
    form = _Form(_boundary(headers), limit)
    writing = store.put(tenant)
    new = await asyncio.to_thread(writing.__enter__)
    try:
        await _read(receive, form, new, limit)
        form.check()
        filename, purpose = form.filename or "upload", form.fields["purpose"]
        return await asyncio.to_thread(new.commit, filename, purpose, form.expires_after_s)
    finally:
        await asyncio.shield(asyncio.to_thread(writing.__exit__, None, None, None))


async def _read(receive: Receive, form: _Form, new: NewFile, limit: int) -> None:
    size, is_last = 0, False
    while not is_last:
        message = await receive()
        if message["type"] != "http.request":
            raise GatewayError(499, "the client disconnected")
        is_last = not message.get("more_body", False)
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit + _FORM_BYTES:
            raise _too_large(limit)
        form.feed(piece)
        if len(form.content) >= _PIECE or (is_last and form.content):
            await asyncio.to_thread(new.upload.write, form.take())
    form.finish()


class _Form:
    """Splits a form into its fields and the content of its file."""

    def __init__(self, boundary: bytes, limit: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.content = bytearray()  # what is not written yet
        self._limit = limit
        self._size = 0  # of the content so far
        self._parts = 0
        self._name = ""
        self._header, self._value = bytearray(), bytearray()
        self._text: bytearray | None = None  # None: this part is the file
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }
        self._is_over = False
        untyped: Any = callbacks
        with _as_bad_form():
            self._parser = MultipartParser(boundary, untyped)

    def feed(self, piece: bytes) -> None:
        """Parse a piece of the body; raises `GatewayError`."""
        with _as_bad_form():
            self._parser.write(piece)

    def finish(self) -> None:
        """The body is over; raises `GatewayError` where the form is not."""
        with _as_bad_form():
            self._parser.finalize()
        if not self._is_over:
            raise _bad("the form ends in the middle")

    def take(self) -> bytes:
        """The content that is to be written."""
        content = bytes(self.content)
        self.content.clear()
        return content

    def check(self) -> None:
        """Raises `GatewayError` for missing, unknown and wrong fields."""
        if self.filename is None:
            raise _bad("give a file", "file")
        if not self._size:
            raise _bad("the file is empty", "file")
        unknown = sorted(self.fields.keys() - _FIELDS)
        if unknown:
            raise _bad(f"{unknown[0][:80]}: this server does not know this field", unknown[0][:80])
        if self.fields.get("purpose") not in _PURPOSES:
            raise _bad("purpose: must be `batch`, `user_data` or `vision`", "purpose")
        if _ANCHOR in self.fields or _SECONDS in self.fields:
            self._check_expiry()

    def _check_expiry(self) -> None:
        if self.fields.get(_ANCHOR) != "created_at":
            raise _bad(f"{_ANCHOR}: must be `created_at`", _ANCHOR)
        seconds = self.fields.get(_SECONDS, "")
        is_number = seconds.isascii() and seconds.isdecimal() and len(seconds) < 9
        if not is_number or int(seconds) not in LIFETIMES_S:
            raise _bad(f"{_SECONDS}: must be {LIFETIMES_S[0]} to {LIFETIMES_S[-1]}", _SECONDS)

    @property
    def expires_after_s(self) -> int | None:
        """How long the file lives; None: until it is deleted."""
        return int(self.fields[_SECONDS]) if _SECONDS in self.fields else None

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _bad(f"the form has more than {_MOST_PARTS} fields")
        self._name, self._text = "", bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._on_disposition(bytes(self._value))
        self._header.clear()
        self._value.clear()

    def _on_disposition(self, value: bytes) -> None:
        _, options = parse_options_header(value)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name != "file":
            return
        if self.filename is not None:
            raise _bad("give one file", "file")
        given = options.get(b"filename", b"").decode(errors="replace")
        self.filename = _shown(given)
        self._text = None

    def _on_headers_finished(self) -> None:
        if not self._name:
            raise _bad("a part of the form has no name")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._text is None:
            self._size += end - start
            if self._size > self._limit:
                raise _too_large(self._limit)
            self.content += memoryview(data)[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > _MOST_FIELD:
            raise _bad(f"{self._name[:80]}: more than {_MOST_FIELD} bytes", self._name[:80])

    def _on_part_end(self) -> None:
        if self._text is not None:
            self.fields[self._name] = self._text.decode(errors="replace")

    def _on_end(self) -> None:
        self._is_over = True


def _boundary(headers: Headers) -> bytes:
    kind, options = parse_options_header(headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise _bad("send a form: Content-Type: multipart/form-data with a boundary")
    return boundary


def _shown(filename: str) -> str:
    """A client's name for a file, without folders and what cannot be printed."""
    last = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(each for each in last if each.isprintable())[:MAX_FILENAME]


def _bad(message: str, param: str | None = None) -> GatewayError:
    return GatewayError(400, message, param=param)


def _too_large(limit: int) -> GatewayError:
    message = f"the file has more than {limit} bytes"
    return GatewayError(413, message, param="file")


@contextlib.contextmanager
def _as_bad_form() -> Any:
    try:
        yield
    except FormParserError as error:
        raise _bad(f"the form is broken: {error}") from error
