"""Which worker has which prefixes and sessions, guessed from the requests that it was given.

A guess in memory that nothing depends on: bounded, forgotten when a worker leaves, and learned
again after a takeover from the entries on the lanes (`coordinator.dispatch.lane_scanner`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from coordinator.routing.policies import Match
from coordinator.routing.queued_request import RoutingFeatures

#: Tokens of a block; workers report the size of their caches in tokens.
BLOCK_TOKENS: Final = 16
#: Blocks remembered of a worker that does not report the size of its cache (those of a million
#: tokens), and of all workers together, which take 200 MB at most.
MOST_OF_ONE: Final = 65_536
MOST_OF_ALL: Final = 1_000_000
MOST_SESSIONS: Final = 100_000


@dataclass(slots=True)
class Cache:
    """What is known of a worker's prefix cache; two are equal whatever their content is."""

    tokens: int = 0  # its size; 0: unknown
    weights: str = ""  # other weights have another cache
    #: When each block was last used; the least recently used first.
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict, compare=False)


class Prefixes:
    """Remembers which workers were given which prompts recently."""

    def __init__(self) -> None:
        self._known: dict[str, Cache] = {}
        self._sessions: OrderedDict[int, str] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        """The number of blocks of all workers."""
        return sum(len(known.blocks) for known in self._known.values())

    def follow(self, caches: Mapping[str, Cache]) -> None:
        """Keep the prefixes of these workers whose caches are still the same; forget others."""
        self._known = {
            worker: known if (known := self._known.get(worker)) and known == cache else cache
            for worker, cache in caches.items()
        }
        for known in self._known.values():
            self._trim(known)

    def matches(self, workers: Iterable[str], features: RoutingFeatures) -> dict[str, Match]:
        """What these workers probably have of a request, where it is anything."""
        blocks = features.blocks
        home = self._sessions.get(features.session, "") if features.session else ""
        found: dict[str, Match] = {}
        for worker in workers:
            known = self._known.get(worker)
            if known is None or not (worker == home or (blocks and blocks[0] in known.blocks)):
                continue
            depth = sum(1 for _ in takewhile(known.blocks.__contains__, blocks))
            recency = known.blocks[blocks[depth - 1]] if depth else 0
            found[worker] = Match(depth, len(blocks), recency, worker == home)
        return found

    def note(self, worker: str, features: RoutingFeatures) -> None:
        """A worker is given a request: it will have its prompt and its session."""
        known = self._known.get(worker)
        if known is None:  # until the roster is read again
            return
        self._clock += 1
        # The beginning is used last, so that a prefix is forgotten from its end.
        for block in reversed(features.blocks):
            known.blocks[block] = self._clock
            known.blocks.move_to_end(block)
        self._trim(known)
        if features.session:
            self._sessions[features.session] = worker
            self._sessions.move_to_end(features.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def _trim(self, known: Cache) -> None:
        most = known.tokens // BLOCK_TOKENS or MOST_OF_ONE
        most = min(most, MOST_OF_ALL // len(self._known))
        while len(known.blocks) > most:
            known.blocks.popitem(last=False)
