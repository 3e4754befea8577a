"""A folder of wheels cut into pieces, carried, and joined again."""

import random
import zipfile
from pathlib import Path

import gpu_pieces
import pytest
from gpu_pieces import BadPieces, join, split

KERNELS = random.Random(1).randbytes(3 * gpu_pieces.MIB)


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    info = f"{'-'.join(name.split('-')[:2])}.dist-info"
    record = "".join(f"{file},sha256=x,{len(data)}\n" for file, data in files.items())
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, data in files.items():
            wheel.writestr(file, data)
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return folder / name


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    write_wheel(folder, "big-1-py3-none-any.whl", {"big/old.so": KERNELS, "big/a.py": b"a = 1\n"})
    write_wheel(folder, "small-2-py3-none-any.whl", {"small.py": b"b = 2\n"})
    return folder


@pytest.fixture
def pieces(wheels):
    """The wheels in pieces of a MiB."""
    folder = wheels.parent / "pieces"
    split(wheels, folder, mib=1)
    return folder


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.long
def test_a_join_restores_the_split_files(wheels, tmp_path):
    manifest = split(wheels, tmp_path / "pieces", mib=1)

    assert len(manifest.pieces) == 4, "3 MiB that do not compress, and a little"
    for piece in manifest.pieces:
        assert (tmp_path / "pieces" / piece.name).stat().st_size <= gpu_pieces.MIB

    join(tmp_path / "pieces", tmp_path / "back")

    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == sorted(
        p.name for p in wheels.iterdir()
    )
    for wheel in wheels.iterdir():
        assert members(tmp_path / "back" / wheel.name) == members(wheel)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:9] + b"?" + data[10:]]
)
def test_a_damaged_piece_is_named(pieces, tmp_path, damage):
    piece = pieces / "wheels.001"
    piece.write_bytes(damage(piece.read_bytes()))

    with pytest.raises(BadPieces, match=r"^The piece wheels\.001 is damaged .*: copy it again\.$"):
        join(tmp_path / "pieces", tmp_path / "back")
