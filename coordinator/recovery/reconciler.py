"""Ledgers and streams agree: requests whose entry somebody has deleted by hand are ended.

Each script moves a request whole, so what it finds astray was deleted by a stranger (`XDEL`,
`XTRIM`, `XADD` with MAXLEN). Nobody else would ever answer it. The ledgers are looked through with
SCAN, a bounded part once a second, and without a pause once something was found or missed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import redis
from msgspec import Struct, field

from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass
from tokenyard.protocol.reconciliation import LAST, LAST_FOUND, Pass, encode_pass
from tokenyard.protocol.texts import counted
from tokenyard.scripts import LedgerScan, LostRequest, Reconciled, Scripts

log = logging.getLogger("tokenyard.coordinator.reconciler")

EVERY_S: Final = 1.0
#: Keys of the server that one round looks at, about (a request that waits or runs counts as
#: five), and requests that one round ends.
MOST_LOOKED_AT: Final = 1000
MOST_ENDED: Final = 100
#: After a pass in a hurry that was called for there is none for so many times its own time.
REST: Final = 9
#: Requests watched that their worker may still end.
MOST_WATCHED: Final = 10_000
#: A pass that has found nothing is told of so often.
TELL_EVERY_S: Final = 60.0
#: What Valkey and Redis say where a script does what its user may not.
_NO_RIGHT: Final = ("ACL failure in script", "The user executing the script can't")


class _Tally(Struct):
    """What one pass has seen so far."""

    began: float  # monotonic
    ledgers: int = 0
    ended: int = 0
    tokens: int = 0
    missed: set[LostRequest] = field(default_factory=set)  # that their workers may still end
    counts: list[int] = field(default_factory=list)  # of tokens that wait, at each round

    @property
    def excess(self) -> int:
        """Tokens that wait by count and not in truth.

        Exact where one round was enough, since it is atomic. Else a ledger is seen at any moment
        of the pass, and so is the count.
        """
        return round(sum(self.counts) / len(self.counts)) - self.tokens


class LedgerReconciler:
    """Looks through the ledgers, over and over, and ends what is lost."""

    def __init__(
        self,
        scripts: Scripts,
        *,
        patience_s: float,
        clock: Callable[[], float] = lambda: time.time() * 1000,
        ended: Callable[[IntakeClass], None] = lambda _: None,
    ) -> None:
        """A worker with a lease is waited for ``patience_s``: it may have read the entry before.

        ``clock`` gives the server's time in ms; ``ended`` hears of each request that is ended.
        """
        self._scripts = scripts
        self._patience_s = patience_s
        self._ended = ended
        self._clock = clock
        self._missed: dict[LostRequest, float] = {}  # since when (monotonic)
        self._told_at = -math.inf
        self._rests_until = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin anew, in a hurry: a term of leadership begins."""
        self._cursor, self._due, self._hurries, self._is_refused = 0, 0.0, True, False
        self._tally = _Tally(time.monotonic())

    @property
    def has_more(self) -> bool:
        """Whether the next round should not wait."""
        return self._hurries and not self._is_refused

    def hurry(self) -> None:
        """An entry was missed; it may have been deleted, or its request cancelled."""
        if not self._hurries and time.monotonic() >= self._rests_until:
            self.begin()

    def run_once(self, token: str) -> bool:
        """One round, when it is due; False for a deposed leader."""
        if self._is_refused or (not self._hurries and time.monotonic() < self._due):
            return True
        self._due = time.monotonic() + EVERY_S
        try:
            look = self._scripts.astray(self._cursor, MOST_LOOKED_AT)
        except redis.exceptions.ResponseError as error:
            if not any(words in str(error) for words in _NO_RIGHT):
                raise
            self._is_refused = True
            log.warning("requests whose entry is deleted by hand will not be noticed: %s", error)
            return True
        lost = [one for one in look.found if self._is_lost(one)]
        if not self._end(token, lost[:MOST_ENDED]):
            return False
        if len(lost) > MOST_ENDED:  # the same part again, where there are fewer now
            self._hurries = True
            return True
        return self._go_on(token, look)

    def _is_lost(self, one: LostRequest) -> bool:
        """Whether nobody can answer a request any more."""
        if not one.may_run:
            return True
        now = time.monotonic()
        if one not in self._missed and len(self._missed) >= MOST_WATCHED:
            return False
        self._tally.missed.add(one)
        return now - self._missed.setdefault(one, now) >= self._patience_s

    def _end(self, token: str, lost: Sequence[LostRequest]) -> bool:
        """End requests; False for a deposed leader."""
        if not lost:
            return True
        codes = self._scripts.reconcile(token, lost)
        if Reconciled.NOT_LEADER in codes:
            return False
        for one, code in zip(lost, codes, strict=True):
            self._missed.pop(one, None)
            if code is Reconciled.ENDED:
                self._note(one)
        self._hurries = True
        return True

    def _note(self, one: LostRequest) -> None:
        self._tally.ended += 1
        self._ended(_class_of(one))
        place = f"entry {one.entry or '?'} is not in {one.where or '?'}"
        log.info("ended %s/%r as ENTRY_LOST: %s", one.client, one.request_id, place)

    def _go_on(self, token: str, look: LedgerScan) -> bool:
        """Sum up; at the end of a pass tell of it, and set the count of tokens right."""
        tally = self._tally
        tally.ledgers += look.ledgers
        tally.tokens += look.tokens
        tally.counts.append(look.queued_tokens)
        self._cursor = look.cursor
        if look.cursor:
            return True
        return self._conclude(token)

    def _conclude(self, token: str) -> bool:
        """A pass is over: set the count of tokens right, and tell what was found."""
        tally, now = self._tally, time.monotonic()
        took_s = now - tally.began
        excess = tally.excess if tally.ended or len(tally.counts) == 1 else 0
        told = {}
        if tally.ended or now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            packed = encode_pass(Pass(round(self._clock()), took_s, tally.ledgers, tally.ended))
            told = {LAST: packed, **({LAST_FOUND: packed} if tally.ended else {})}
        if self._hurries:
            self._rests_until = now + REST * took_s
        if tally.ended:
            ended, ledgers = counted(tally.ended, "request"), counted(tally.ledgers, "ledger")
            log.warning("ended %s whose entry was deleted, of %s", ended, ledgers)
        self._hurries, self._tally = False, _Tally(now)
        self._missed = {one: self._missed[one] for one in tally.missed if one in self._missed}
        if not excess and not told:
            return True
        codes = self._scripts.reconcile(token, excess_tokens=excess, info=told)
        return Reconciled.NOT_LEADER not in codes


def _class_of(one: LostRequest) -> IntakeClass:
    """The intake that it was deleted from; of a lane nobody knows any more whence it came."""
    return next((name for name in INTAKE_CLASSES if name == one.where), "normal")
