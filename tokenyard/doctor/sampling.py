"""How many keys of each kind a yard has and what they weigh: counted and sampled, within bounds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.protocol.keys import Keys

#: The look through the keys ends after so long, or so many keys of any yard.
MOST_S: Final = 3.0
MOST_KEYS: Final = 200_000
#: Keys of a kind that are weighed.
WEIGHED: Final = 50
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Kind:
    """The keys of one kind."""

    count: int
    bytes: int  # about


@dataclass(frozen=True, slots=True)
class KeySample:
    """The keys of a yard."""

    kinds: Mapping[str, Kind]  # by the first word behind the yard
    lanes: Mapping[str, int]  # entries of each lane that there is, by worker
    is_whole: bool  # whether all keys of the server were looked at


def sample_keys(run: Any, keys: Keys) -> KeySample:
    """Look through the keys of a yard with SCAN; ``run`` is a connection."""
    prefix = f"tokenyard:{{{keys.yard}}}:"
    found, is_whole = _scan(run, prefix)
    kinds = {}
    for kind, names in sorted(found.items()):
        weighed = _weigh(run, names[:WEIGHED])
        kinds[kind] = Kind(len(names), round(weighed * len(names)))
    return KeySample(kinds, _lanes(run, keys, found.get("lane", [])), is_whole)


def _scan(run: Any, prefix: str) -> tuple[dict[str, list[bytes]], bool]:
    """Names of keys by kind, and whether these are all. No name of a yard is special to MATCH."""
    found: dict[str, list[bytes]] = defaultdict(list)
    start, cursor, seen = prefix.encode(), 0, 0
    until = time.monotonic() + MOST_S
    while True:
        cursor, names = run.scan(cursor, match=prefix + "*", count=_PAGE)
        seen += _PAGE
        for name in set(names):
            kind = name.removeprefix(start).partition(b":")[0]
            found[kind.decode(errors="replace")].append(name)
        if not cursor:
            # SCAN may name a key more than once.
            return {kind: list(dict.fromkeys(names)) for kind, names in found.items()}, True
        if seen >= MOST_KEYS or time.monotonic() >= until:
            return dict(found), False


def _weigh(run: Any, names: list[bytes]) -> float:
    """What one of these keys weighs, on the average, in bytes; one that is gone weighs nothing."""
    pipeline = run.pipeline(transaction=False)
    for name in names:
        pipeline.memory_usage(name)
    weights: list[int] = [weight for weight in pipeline.execute() if weight]
    return sum(weights) / max(1, len(weights))


def _lanes(run: Any, keys: Keys, names: list[bytes]) -> dict[str, int]:
    start = keys.lane("").encode()
    pipeline = run.pipeline(transaction=False)
    for name in names:
        pipeline.xlen(name)
    lengths = pipeline.execute()
    workers = (name.removeprefix(start).decode(errors="replace") for name in names)
    return dict(zip(workers, lengths, strict=True))
