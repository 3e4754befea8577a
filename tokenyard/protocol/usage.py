"""The fields of ``usage:<tenant>``, what a tenant has used: ``<yyyymmdd> <model> <what>``.

`tenant_sums.lua` writes them, by the server's day in UTC.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Final

#: Before the upper end of a bucket, a power of two of ms: first dispatches after such a wait.
WAIT: Final = "wait:"
#: Before the code of an error: requests that failed so.
FAILED: Final = "failed:"
#: Bytes of a model's name that are kept.
MOST_OF_MODEL: Final = 200
#: Days that usage is kept, today included.
KEPT_DAYS: Final = 62


def day_before(now_s: float, back: int) -> str:
    """The day so many days ago, in digits."""
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    return f"{now - datetime.timedelta(back):%Y%m%d}"


def is_day(text: bytes) -> bool:
    """Whether this is a day in digits."""
    return len(text) == len("yyyymmdd") and text.isdigit()


def field_of(day: str, model: str, what: str) -> bytes:
    """The name of a field."""
    return b"%b %b %b" % (day.encode(), model.encode()[:MOST_OF_MODEL], what.encode())


def outdated(fields: Iterable[bytes], now_s: float) -> list[bytes]:
    """Those that are older than what is kept."""
    oldest = day_before(now_s, KEPT_DAYS - 1).encode()
    days = ((name, name.partition(b" ")[0]) for name in fields)
    return [name for name, day in days if is_day(day) and day < oldest]
