"""Counts the keys of a yard by kind, and samples their memory, within limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenyard import clock
from tokenyard.protocol.keys import Keys

#: The scan ends after this time, or this many keys of any yard.
MOST_S: Final = 3.0
MOST_KEYS: Final = 200_000
#: Keys per kind whose memory is measured.
MAX_MEASURED: Final = 50
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Kind:
    """The keys of one kind."""

    count: int
    bytes: int  # estimated


@dataclass(frozen=True, slots=True)
class KeySample:
    """The keys of a yard."""

    kinds: Mapping[str, Kind]  # by the first word after the yard
    lanes: Mapping[str, int]  # entries of each lane, by worker
    is_whole: bool  # whether all keys of the server were scanned


def sample_keys(run: Any, keys: Keys) -> KeySample:
    """Scan the keys of a yard; ``run`` is a connection."""
    prefix = f"tokenyard:{{{keys.yard}}}:"
    found, is_whole = _scan(run, prefix)
    kinds = {}
    for kind, names in sorted(found.items()):
        average = _average_bytes(run, names[:MAX_MEASURED])
        kinds[kind] = Kind(len(names), round(average * len(names)))
    return KeySample(kinds, _lanes(run, keys, found.get("lane", [])), is_whole)


def _scan(run: Any, prefix: str) -> tuple[dict[str, list[bytes]], bool]:
    """Names of keys by kind, and whether these are all. Yard names need no escaping in MATCH."""
    found: dict[str, list[bytes]] = defaultdict(list)
    start, cursor, seen = prefix.encode(), 0, 0
    until = clock.monotonic() + MOST_S
    while True:
        cursor, names = run.scan(cursor, match=prefix + "*", count=_PAGE)
        seen += _PAGE
        for name in set(names):
            kind = name.removeprefix(start).partition(b":")[0]
            found[kind.decode(errors="replace")].append(name)
        if not cursor:
            # SCAN may name a key more than once.
            return {kind: list(dict.fromkeys(names)) for kind, names in found.items()}, True
        if seen >= MOST_KEYS or clock.monotonic() >= until:
            return dict(found), False


def _average_bytes(run: Any, names: list[bytes]) -> float:
    """The average memory of these keys in bytes."""
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
