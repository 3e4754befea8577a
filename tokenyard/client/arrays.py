"""The numbers of a result as numpy arrays; needs the extra `arrays`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenyard.protocol.replies import Result

Array = NDArray[np.float32]


def arrays(result: Result) -> list[Array | None]:
    """The numbers of each input of a request that pools; None for one that has failed.

    They are views of `Result.data`, in the shapes that vLLM gives them: of an embedding its
    dimensions, of classes their number, of a score none, of tokens one row each.
    """
    found: list[Array | None] = []
    at = 0
    for shape in result.shapes or ():
        if shape is None:
            found.append(None)
            continue
        one: NDArray[Any] = np.frombuffer(result.data or b"", "<f4", math.prod(shape), at)
        found.append(one.reshape(shape))
        at += one.nbytes
    return found
