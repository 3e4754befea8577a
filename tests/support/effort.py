"""Duration of searches by TOKENYARD_TEST_DEEP: 0 in `make test`, 1 in `make test-long`."""

from __future__ import annotations

import os
from typing import Final

_DEEP: Final = os.environ.get("TOKENYARD_TEST_DEEP", "")
IS_DEEP: Final = _DEEP == "1"
#: Of searches without a number of their own. By default it is Hypothesis's.
DEFAULT_EXAMPLES: Final = {"0": 10, "1": 400}.get(_DEEP, 100)


def examples(everyday: int, deep: int) -> int:
    """The number of examples of a search with its own default."""
    return deep if IS_DEEP else everyday
