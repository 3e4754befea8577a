"""The numbers of a result as numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.protocol.replies import Result, data_of_inputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def arrays(result: Result) -> list[NDArray[np.float32] | None]:
    """The numbers of each input of a request that pools; None for one that has failed.

    They cannot be changed, and have the shapes that vLLM gives them: of an embedding its
    dimensions, of classes their number, of a score none, of tokens one row each. Raises
    `ImportError` without the extra `arrays`.
    """
    import numpy as np  # not at the top: a client is light

    return [
        None if shape is None else np.frombuffer(data, np.dtype("<f4")).reshape(shape)
        for shape, data in data_of_inputs(result)
    ]
