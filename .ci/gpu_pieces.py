"""Splits a folder of wheels into pieces of a bounded size, and joins them.

It repacks the wheels without compression and compresses the whole with xz, which reduces vLLM to
70 % of its wheel. Joining restores valid wheels with the same files.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Final

MIB: Final = 1 << 20
MANIFEST: Final = "manifest.json"
LEFT_OUT: Final = "left_out.txt"
#: Blocks are compressed separately, so that all cores pack and unpack.
_BLOCK: Final = 32 * MIB
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)


class BadPieces(Exception):
    """Unusable pieces or wheels; the message says in one sentence what to do."""


@dataclass(frozen=True)
class Sum:
    """A file's name and expected content."""

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Reject names that are not plain file names."""
        if Path(self.name).name != self.name:
            raise ValueError(self.name)


@dataclass(frozen=True)
class Manifest:
    """The pieces, and the wheels that they contain."""

    pieces: tuple[Sum, ...]
    wheels: tuple[Sum, ...]
    #: Bytes of each compressed block; the pieces hold the blocks in sequence.
    blocks: tuple[int, ...]
    #: Members of wheels that were left out.
    left_out: tuple[str, ...]


def split(folder: Path, pieces: Path, *, mib: int, leave_out: Sequence[str] = ()) -> Manifest:
    """Write the wheels of `folder` as pieces of at most `mib` MiB, without the members `leave_out`.

    Raises BadPieces if there are no wheels, and for a glob that matches nothing.
    """
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise BadPieces(f"There are no wheels in {folder}: name the folder that `wheels` filled.")
    pieces.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=pieces) as scratch:
        stored = [Path(scratch, wheel.name) for wheel in found]
        left = [
            name
            for old, new in zip(found, stored, strict=True)
            for name in _store(old, new, leave_out)
        ]
        for glob in leave_out:
            if not any(fnmatch(name, glob) for name in left):
                raise BadPieces(
                    f"No wheel has a file like {glob}, so there is nothing to leave out."
                )
        archive = Path(scratch, "archive")
        blocks = _compress(stored, archive)
        manifest = Manifest(
            pieces=tuple(_cut(archive, pieces, mib * MIB)),
            wheels=tuple(_sum(wheel) for wheel in stored),
            blocks=tuple(blocks),
            left_out=tuple(left),
        )
    (pieces / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    return manifest


def join(pieces: Path, folder: Path) -> Manifest:
    """Write the wheels in the pieces to `folder`, unless it has them all intact.

    Raises BadPieces for missing or damaged pieces.
    """
    manifest = read_manifest(pieces)
    if all(_is_intact(folder, wheel) for wheel in manifest.wheels):
        return manifest
    archive = b"".join(_intact_piece(pieces, piece) for piece in manifest.pieces)
    folder.mkdir(parents=True, exist_ok=True)
    _write_wheels(_decompress(archive, manifest.blocks), manifest.wheels, folder)
    for wheel in manifest.wheels:
        if not _is_intact(folder, wheel):
            raise BadPieces(f"{wheel.name} came out damaged: is the disk of {folder} full?")
    if manifest.left_out:
        (folder / LEFT_OUT).write_text("\n".join(manifest.left_out) + "\n", encoding="utf-8")
    return manifest


def read_manifest(pieces: Path) -> Manifest:
    """Read the manifest of the pieces; raises BadPieces if there is none."""
    path = pieces / MANIFEST
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(
            pieces=tuple(Sum(**each) for each in told["pieces"]),
            wheels=tuple(Sum(**each) for each in told["wheels"]),
            blocks=tuple(told["blocks"]),
            left_out=tuple(told["left_out"]),
        )
    except FileNotFoundError:
        raise BadPieces(f"{path} is missing: copy it there from where `split` ran.") from None
    except (ValueError, KeyError, TypeError):
        raise BadPieces(f"{path} is damaged: copy it again from where `split` ran.") from None


def _store(wheel: Path, to: Path, leave_out: Sequence[str]) -> list[str]:
    """Write a wheel uncompressed; returns the members left out of it and of its RECORD."""
    left: list[str] = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(to, "w") as new:
        members = old.infolist()
        left += [m.filename for m in members if any(fnmatch(m.filename, g) for g in leave_out)]
        for member in members:
            if member.filename in left:
                continue
            data = old.read(member)
            if left and member.filename.endswith(".dist-info/RECORD"):
                data = _without(data, left)
            copy = zipfile.ZipInfo(member.filename, _LONG_AGO)
            copy.external_attr = member.external_attr
            new.writestr(copy, data)
    return left


def _without(record: bytes, left: list[str]) -> bytes:
    lines = record.decode().splitlines(keepends=True)
    return "".join(line for line in lines if line.partition(",")[0] not in left).encode()


def _compress(files: list[Path], archive: Path) -> list[int]:
    """Write all files in sequence as xz streams; returns the bytes of each stream."""
    sizes = []
    cores = os.cpu_count() or 1
    with archive.open("wb") as out, ThreadPoolExecutor(cores) as pool:
        blocks = _blocks(files)
        # A few blocks at a time: the whole exceeds the memory of some machines.
        while batch := [block for _, block in zip(range(2 * cores), blocks, strict=False)]:
            sizes += [out.write(packed) for packed in pool.map(lzma.compress, batch)]
    return sizes


def _blocks(files: list[Path]) -> Iterator[bytes]:
    held = b""
    for file in files:
        with file.open("rb") as source:
            while data := source.read(_BLOCK - len(held)):
                held += data
                if len(held) == _BLOCK:
                    yield held
                    held = b""
    if held:
        yield held


def _cut(archive: Path, into: Path, size: int) -> Iterator[Sum]:
    for old in into.glob("wheels.[0-9][0-9][0-9]"):
        old.unlink()
    with archive.open("rb") as source:
        number = 0
        while data := source.read(size):
            piece = into / f"wheels.{number:03}"
            piece.write_bytes(data)
            yield _sum(piece)
            number += 1


def _intact_piece(pieces: Path, piece: Sum) -> bytes:
    try:
        data = (pieces / piece.name).read_bytes()
    except FileNotFoundError:
        raise BadPieces(
            f"The piece {piece.name} is missing from {pieces}: copy it there."
        ) from None
    if hashlib.sha256(data).hexdigest() != piece.sha256:
        raise BadPieces(
            f"The piece {piece.name} is damaged ({len(data)} bytes where {piece.bytes} should be,"
            " or another content): copy it again."
        )
    return data


def _decompress(archive: bytes, sizes: tuple[int, ...]) -> Iterator[bytes]:
    view, start, parts = memoryview(archive), 0, []
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield from pool.map(lzma.decompress, parts)


def _write_wheels(blocks: Iterator[bytes], wheels: tuple[Sum, ...], folder: Path) -> None:
    held = b""
    for wheel in wheels:
        with (folder / wheel.name).open("wb") as out:
            held = _write(out, held, blocks, wheel.bytes)


def _write(out: IO[bytes], held: bytes, blocks: Iterator[bytes], count: int) -> bytes:
    """Write `count` bytes from `held`, then `blocks`; returns the rest of the last block."""
    while count > len(held):
        count -= out.write(held)
        held = next(blocks)
    out.write(held[:count])
    return held[count:]


def _is_intact(folder: Path, wheel: Sum) -> bool:
    path = folder / wheel.name
    return path.is_file() and path.stat().st_size == wheel.bytes and _sum(path) == wheel


def _sum(path: Path) -> Sum:
    with path.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    return Sum(path.name, path.stat().st_size, digest)
