"""Duration of searches: short in `make test`, at least four times as long in `make test-long`."""

from __future__ import annotations

import os
from typing import Final

IS_DEEP: Final = os.environ.get("TOKENYARD_TEST_DEEP") == "1"
#: Hypothesis's own default.
DEFAULT_EXAMPLES: Final = 100


def examples(everyday: int, deep: int) -> int:
    """The number of examples of a search with its own default."""
    return deep if IS_DEEP else everyday
