"""Which checkpoints fit a model: decided from the headers of their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.engines.harness import MODELS
from worker.engines import Unsupported
from worker.engines.checkpoints import check_fit

OWN = {"embed.weight": [4, 2], "head.weight": [2, 4]}


def write(folder: Path, shapes: Mapping[str, Sequence[int]], name: str = "model") -> Path:
    """Write a file with a header and without weights: the check reads only the header."""
    folder.mkdir(exist_ok=True)
    tensors = {
        tensor: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}
        for tensor, shape in shapes.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def tie(folder: Path) -> None:
    (folder / "config.json").write_text('{"tie_word_embeddings": true, "vocab_size": 4}')


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return write(tmp_path / "own", OWN)


def test_a_checkpoint_of_the_same_names_and_shapes_fits(own: Path, tmp_path: Path) -> None:
    check_fit(str(own), str(write(tmp_path / "same", OWN)))
    check_fit(str(own), str(write(tmp_path / "more", OWN | {"rotary.inv_freq": [7]})))
    check_fit(str(MODELS / "adder"), str(MODELS / "subtractor"))


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"embed.weight": [4, 2]}, "has no head.weight"),
        (OWN | {"head.weight": [2, 5]}, r"head.weight has shape \[2, 5\], and must have \[2, 4\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_reason(
    own: Path, tmp_path: Path, shapes: Mapping[str, Sequence[int]], said: str
) -> None:
    other = write(tmp_path / "other", shapes)

    with pytest.raises(Unsupported, match=said):
        check_fit(str(own), str(other))


def test_a_head_that_is_tied_to_the_embedding_may_be_missing(own: Path, tmp_path: Path) -> None:
    write(own, OWN | {"lm_head.weight": [2, 4]})
    other = str(write(tmp_path / "other", OWN))

    with pytest.raises(Unsupported, match="lm_head"):
        check_fit(str(own), other)

    tie(own)
    check_fit(str(own), other)


def test_the_index_names_the_files_that_count(own: Path, tmp_path: Path) -> None:
    # Given a checkpoint in two parts, with another file beside it
    other = write(tmp_path / "other", {"embed.weight": [4, 2]}, "part-1")
    write(other, {"head.weight": [2, 4]}, "part-2")
    write(other, {"embed.weight": [9, 9]}, "something-else")
    names = {"embed.weight": "part-1.safetensors", "head.weight": "part-2.safetensors"}
    index = other / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))

    check_fit(str(own), str(other))

    index.write_text(json.dumps({"weight_map": names | {"norm.weight": "part-3.safetensors"}}))
    with pytest.raises(Unsupported, match="part-3"):
        check_fit(str(own), str(other))


def test_other_formats_are_left_to_the_loader(own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "pytorch_model.bin").write_bytes(b"")

    check_fit(str(own), str(other))
    check_fit("a/name-on-a-hub", str(own))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 64, (8).to_bytes(8, "little") + b"no JSON!", b"\2" + b"\0" * 7 + b"[]"],
)
def test_a_file_that_is_no_checkpoint_is_refused(own: Path, tmp_path: Path, content: bytes) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(content)

    with pytest.raises(Unsupported, match="cannot be read"):
        check_fit(str(own), str(other))


def test_a_place_without_weights_is_refused(own: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no folder"):
        check_fit(str(own), str(tmp_path / "nowhere"))
    with pytest.raises(Unsupported, match="no weights"):
        check_fit(str(own), str(tmp_path))
