"""Checks from the files alone whether a checkpoint can replace the weights of a model.

vLLM finds most mismatches only while it loads, when the old weights are gone, and it only warns of
missing weights. So this module compares the headers of the files before the load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from worker.engines import Unsupported

#: Files from which vLLM reads weights.
_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt")
_INDEX: Final = "model.safetensors.index.json"
#: The limit of the safetensors format.
_MOST_HEADER_BYTES: Final = 100_000_000
_METADATA: Final = "__metadata__"
#: The only tensor that may be missing: some models use that of the embedding for it.
_TIED: Final = "lm_head.weight"

Shapes = Mapping[str, Sequence[int]]


class _Tensor(msgspec.Struct):
    shape: list[int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Config(msgspec.Struct):
    tie_word_embeddings: bool = False


def check_fit(own: str, other: str) -> None:
    """Check that the checkpoint in the folder ``other`` fits the model at ``own``.

    Compares names and shapes of tensors if both are folders of safetensors. Raises `Unsupported`
    with the first mismatch.
    """
    folder, model = Path(other), Path(own)
    if not folder.is_dir():
        raise Unsupported(f"{other}: is no folder on this host; give one with a checkpoint")
    if not any(True for pattern in _PATTERNS for _ in folder.glob(pattern)):
        raise Unsupported(f"{other}: holds no weights ({', '.join(_PATTERNS)})")
    known, found = _shapes(model), _shapes(folder)
    if not known or not found:
        return
    for name, shape in known.items():
        if name not in found and not (name == _TIED and _is_tied(model)):
            raise Unsupported(f"{other}: does not fit the model: it has no {name}")
        if list(found.get(name, shape)) != list(shape):
            raise Unsupported(
                f"{other}: does not fit the model: {name} has shape {list(found[name])}, "
                f"and must have {list(shape)}"
            )


def _shapes(folder: Path) -> Shapes:
    """The shapes of all tensors by name; empty without safetensors."""
    found: dict[str, Sequence[int]] = {}
    for path in _files(folder):
        try:
            found |= _header(path)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise Unsupported(f"{path}: cannot be read: {error}") from error
    return found


def _files(folder: Path) -> Sequence[Path]:
    """The safetensors in the index, if there is one: the folder may hold others."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
    except (OSError, msgspec.MsgspecError) as error:
        raise Unsupported(f"{index}: cannot be read: {error}") from error
    return [folder / name for name in sorted(set(names))]


def _header(path: Path) -> dict[str, Sequence[int]]:
    """The header of a file: its length in eight bytes, little-endian, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError("it is no safetensors file")
        header: dict[str, Any] = msgspec.json.decode(file.read(length), type=dict[str, Any])
    header.pop(_METADATA, None)
    return {name: msgspec.convert(said, _Tensor).shape for name, said in header.items()}


def _is_tied(model: Path) -> bool:
    try:
        config = (model / "config.json").read_bytes()
        return msgspec.json.decode(config, type=_Config).tie_word_embeddings
    except (OSError, msgspec.MsgspecError):
        return False
