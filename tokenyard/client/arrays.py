"""The numbers of a result as numpy arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tokenyard.protocol.replies import Result

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def arrays(result: Result) -> list[NDArray[np.float32] | None]:
    """The numbers of each input of a request that pools; None for one that has failed.

    They are views of `Result.data`, in the shapes that vLLM gives them: of an embedding its
    dimensions, of classes their number, of a score none, of tokens one row each. Raises
    `ImportError` without the extra `arrays`.
    """
    import numpy as np  # not at the top: a client is light

    found: list[NDArray[np.float32] | None] = []
    at = 0
    for shape in result.shapes or ():
        if shape is None:
            found.append(None)
            continue
        one = np.frombuffer(result.data or b"", np.dtype("<f4"), math.prod(shape), at)
        found.append(one.reshape(shape))
        at += one.nbytes
    return found
