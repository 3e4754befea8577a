"""A folder of wheels cut into pieces, carried, and joined again."""

import json
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


def test_pieces_and_blocks_need_not_end_together(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_pieces, "_BLOCK", 700_000)

    manifest = split(wheels, tmp_path / "pieces", mib=2)
    join(tmp_path / "pieces", tmp_path / "back")

    assert (len(manifest.pieces), len(manifest.blocks)) == (2, 5)
    assert members(tmp_path / "back" / "big-1-py3-none-any.whl")["big/old.so"] == KERNELS


def test_a_second_join_leaves_the_wheels_alone(pieces, tmp_path):
    join(pieces, tmp_path / "back")
    (pieces / "wheels.000").unlink()

    join(pieces, tmp_path / "back")


@pytest.mark.long
def test_a_second_split_leaves_no_old_pieces(wheels, pieces):
    split(wheels, pieces, mib=60)

    assert sorted(p.name for p in pieces.iterdir()) == ["manifest.json", "wheels.000"]


def test_a_missing_piece_is_named(pieces, tmp_path):
    (pieces / "wheels.002").unlink()

    with pytest.raises(
        BadPieces, match=r"^The piece wheels\.002 is missing from .*: copy it there"
    ):
        join(tmp_path / "pieces", tmp_path / "back")

    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:9] + b"?" + data[10:]]
)
def test_a_damaged_piece_is_named(pieces, tmp_path, damage):
    piece = pieces / "wheels.001"
    piece.write_bytes(damage(piece.read_bytes()))

    with pytest.raises(BadPieces, match=r"^The piece wheels\.001 is damaged .*: copy it again\.$"):
        join(tmp_path / "pieces", tmp_path / "back")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"pieces": [1], "wheels": []}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)

    with pytest.raises(BadPieces, match=r"manifest\.json is damaged: copy it again"):
        join(tmp_path, tmp_path / "back")


def test_pieces_without_a_manifest_are_refused(tmp_path):
    with pytest.raises(BadPieces, match=r"manifest\.json is missing: copy it there"):
        join(tmp_path, tmp_path / "back")


def test_a_manifest_writes_only_into_its_folder(pieces, tmp_path):
    told = json.loads((pieces / "manifest.json").read_text())
    told["wheels"][0]["name"] = "../elsewhere.whl"
    (pieces / "manifest.json").write_text(json.dumps(told))

    with pytest.raises(BadPieces, match=r"manifest\.json is damaged"):
        join(tmp_path / "pieces", tmp_path / "back")

    assert not (tmp_path / "elsewhere.whl").exists()


def test_excluded_members_are_in_no_record(wheels, tmp_path):
    manifest = split(wheels, tmp_path / "pieces", mib=1, leave_out=["big/*.so"])
    join(tmp_path / "pieces", tmp_path / "back")

    assert manifest.left_out == ("big/old.so",)
    assert (tmp_path / "back" / "left_out.txt").read_text() == "big/old.so\n"
    left = members(tmp_path / "back" / "big-1-py3-none-any.whl")
    assert sorted(left) == ["big-1.dist-info/RECORD", "big/a.py"]
    assert b"old.so" not in left["big-1.dist-info/RECORD"]


def test_a_glob_without_a_match_is_refused(wheels, tmp_path):
    with pytest.raises(BadPieces, match=r"No wheel has a file like big/\*\.dll"):
        split(wheels, tmp_path / "pieces", mib=1, leave_out=["big/*.dll"])


def test_a_folder_without_wheels_is_refused(tmp_path):
    with pytest.raises(BadPieces, match="There are no wheels in"):
        split(tmp_path, tmp_path / "pieces", mib=1)
