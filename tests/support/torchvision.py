"""torchvision for a torch without CUDA, out of its usual wheel.

The processors of many models that see pictures need its transforms, which are plain Python. But the
wheel is built with CUDA: its compiled operators do not load here, and without two of them it cannot
be imported. So they are declared, and never called.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.support.wheels import UNPACKED, fetch_wheel

#: That of the torch in requirements.txt.
VERSION = "0.28.0"
_FOLDER = UNPACKED / "torchvision"
_OPERATORS = """
import torch

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def torchvision() -> Path:
    """The folder with the package, for `PYTHONPATH`; it is downloaded once (8 MB)."""
    folder = _FOLDER / VERSION
    if folder.exists():
        return folder
    wheel = fetch_wheel(f"torchvision=={VERSION}", _FOLDER)
    unpacked = _FOLDER / "unpacked"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(unpacked)
    package = unpacked / "torchvision" / "__init__.py"
    package.write_text(_OPERATORS + package.read_text())
    unpacked.rename(folder)
    wheel.unlink()
    return folder
