"""Which worker has which prefixes and sessions, as far as can be guessed from what it was given.

A hint in memory that nothing depends on: bounded, forgotten when a worker leaves, and after a
takeover learned anew from what lies on the lanes (`coordinator.dispatch.lane_scanner`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from coordinator.routing.affinity import Match
from coordinator.routing.features import RoutingFeatures

#: Tokens of a block; what a worker says of its cache is in tokens.
BLOCK_TOKENS: Final = 16
#: Blocks that are remembered of a worker that does not say how much its cache holds: those of a
#: million tokens. And of all workers together, which takes 200 MB at most.
MOST_OF_ONE: Final = 65_536
MOST_OF_ALL: Final = 1_000_000
MOST_SESSIONS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Cache:
    """What is known of a worker's prefix cache."""

    tokens: int = 0  # that it holds; 0: unknown
    weights: str = ""  # with others it is another cache


@dataclass(slots=True)
class _Known:
    cache: Cache
    #: Block to when it was last wanted; the least recently wanted first.
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict)


class Prefixes:
    """Remembers who was given which prompts lately."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._sessions: OrderedDict[int, str] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        """Blocks that are remembered, of all workers."""
        return sum(len(known.blocks) for known in self._known.values())

    def follow(self, caches: Mapping[str, Cache]) -> None:
        """Keep what is known of these workers, whose caches are still the same; forget others."""
        self._known = {
            worker: known
            if (known := self._known.get(worker)) and known.cache == cache
            else _Known(cache)
            for worker, cache in caches.items()
        }
        for known in self._known.values():
            self._trim(known)

    def matches(self, workers: Iterable[str], features: RoutingFeatures) -> dict[str, Match]:
        """What those of the workers have of a request that have anything of it."""
        blocks = features.blocks
        at_home = self._sessions.get(features.session, "") if features.session else ""
        found: dict[str, Match] = {}
        for worker in workers:
            known = self._known.get(worker)
            if known is None or not (worker == at_home or (blocks and blocks[0] in known.blocks)):
                continue
            depth = _depth(known.blocks, blocks)
            recency = known.blocks[blocks[depth - 1]] if depth else 0
            found[worker] = Match(depth, len(blocks), recency, worker == at_home)
        return found

    def note(self, worker: str, features: RoutingFeatures) -> None:
        """A worker is given a request: it will have its prompt, and its session lives there."""
        known = self._known.get(worker)
        if known is None:  # it will be known when the roster was read
            return
        self._clock += 1
        # The beginning is wanted last, so that a prefix is forgotten from its end.
        for block in reversed(features.blocks):
            known.blocks[block] = self._clock
            known.blocks.move_to_end(block)
        self._trim(known)
        if features.session:
            self._sessions[features.session] = worker
            self._sessions.move_to_end(features.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def _trim(self, known: _Known) -> None:
        most = known.cache.tokens // BLOCK_TOKENS or MOST_OF_ONE
        most = min(most, MOST_OF_ALL // len(self._known))
        while len(known.blocks) > most:
            known.blocks.popitem(last=False)


def _depth(known: Mapping[int, int], blocks: Iterable[int]) -> int:
    """How many blocks are known, from the first on."""
    depth = 0
    for block in blocks:
        if block not in known:
            break
        depth += 1
    return depth
