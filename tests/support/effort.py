"""How long tests search: briefly in `make test`, four times as long or more in `make test-long`."""

from __future__ import annotations

import os
from typing import Final

IS_DEEP: Final = os.environ.get("TOKENYARD_TEST_DEEP") == "1"
#: What Hypothesis does by default.
DEFAULT_EXAMPLES: Final = 100


def examples(everyday: int, deep: int) -> int:
    """The number of examples of a search that does not use the default."""
    return deep if IS_DEEP else everyday
