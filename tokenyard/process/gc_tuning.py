"""How often a service looks for cycles of garbage.

Services make many objects for each request and hardly a cycle, so Python's collector, which looks
after each 700 objects, takes a tenth of their time and finds nothing (measured). Clients keep what
their programs have chosen.
"""

from __future__ import annotations

import gc
from typing import Final

#: Objects made and not freed before the youngest generation is looked at, and so on.
SELDOM: Final = (50_000, 20, 100)


def collect_seldom() -> None:
    """Look seldom, and never at what is there already: the imported program."""
    gc.freeze()
    gc.set_threshold(*SELDOM)
