"""Lists the requests of a yard in any state, and finds the clients of an id.

Waiting and assigned requests are read from the intakes and lanes, page by page; ended ones from the
ledgers, which SCAN finds. The query limits both. Errors of redis-py pass, for
`tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from redis.exceptions import NoPermissionError

from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.keys import NAME_RULE, PRIORITY_CLASSES, Yard, intake_name, is_name
from tokenyard.protocol.replies import TERMINAL
from tokenyard.protocol.texts import cut, printable, span_ms
from tokenyard.protocol.wire import DEFAULT_CLIENT, MAX_ID_BYTES, Request
from tokenyard.yard.pauses import pauses_of_model, pauses_of_worker
from tokenyard.yard.reads import Budget, Owned, entries, intakes, ledgers, pages
from tokenyard.yard.requests import (
    IN_FLIGHT,
    STATES,
    Listed,
    Place,
    by_ledger,
    in_intake,
    on_lane,
    published,
    read_submitted,
    with_results,
)
from tokenyard.yard.snapshot import YardView, read_yard

ORDERS: Final = ("oldest", "newest")
#: The parameters that say what is wanted, beside the states and the order.
_TEXTS: Final = ("id", "client", "tenant", "model", "worker", "error", "older", "newer")
_MOST_WORDS: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """The requests that are wanted, as the operator gave it."""

    id: str = ""
    client: str = ""
    tenant: str = ""
    model: str = ""
    worker: str = ""
    error: str = ""
    older: str = ""  # times like 5m
    newer: str = ""
    states: tuple[str, ...] = ()
    order: str = ""  # one of `ORDERS`; "": oldest first in flight, newest first with ended ones

    @property
    def wanted_states(self) -> frozenset[str]:
        """The states: those asked for, else all by an id or an error, else those in flight."""
        if self.states:
            return frozenset(self.states)
        return frozenset(STATES) if self.id or self.error else IN_FLIGHT

    @property
    def searches_ended(self) -> bool:
        """Whether ledgers must be searched, which only an explicit question does."""
        return not self.wanted_states <= IN_FLIGHT and not (self.id and self.client)

    @property
    def oldest_first(self) -> bool:
        """The order that is asked for, or the usual one."""
        if self.order:
            return self.order == "oldest"
        return self.wanted_states <= IN_FLIGHT

    @property
    def is_empty(self) -> bool:
        """Whether everything in flight is wanted."""
        return not self.states and not any(getattr(self, name) for name in _TEXTS)

    def parameters(self) -> list[tuple[str, str]]:
        """Names and values for an address or the fields of a form."""
        found = [(name, getattr(self, name)) for name in (*_TEXTS, "order") if getattr(self, name)]
        return [*found, *(("state", state) for state in self.states)]

    def query(self, states: frozenset[str] = frozenset(STATES), **limits: Any) -> Query:
        """The query for those of its states that are in ``states`` too, within these limits."""
        names = ("model", "client", "tenant", "id", "worker", "error")
        return Query(
            states=self.wanted_states & states,
            older_ms=_span("older", self.older),
            newer_ms=_span("newer", self.newer),
            oldest_first=self.oldest_first,
            **{name: getattr(self, name) for name in names},
            **limits,
        )

    def words(self) -> str:
        """What it finds, in one short line: for previews and the audit."""
        return ", ".join(["requests", *self._words()])

    def _words(self) -> Iterator[str]:
        if self.states:
            yield " or ".join(self.states)
        for name in ("id", "client", "tenant", "model", "worker"):
            if value := getattr(self, name):
                yield f"{name} {_short(value)}"
        if self.error:
            yield f"error with {_short(self.error)!r}"
        if self.older:
            yield f"at least {self.older} old"
        if self.newer:
            yield f"at most {self.newer} old"


def read_filter(given: Mapping[str, Any]) -> Filter:
    """The filter of an address, a form or a command line; raises `BadInput`."""
    texts = {name: given.get(name) or "" for name in _TEXTS}
    states = tuple(dict.fromkeys(given.get("state") or ()))
    if not set(states) <= set(STATES):
        raise BadInput(f"state: give one or more of {', '.join(STATES)}", "state")
    if len(texts["id"].encode(errors="replace")) > MAX_ID_BYTES:
        raise BadInput(f"id: a request's id has 1 to {MAX_ID_BYTES} bytes", "id")
    if texts["client"] and not is_name(texts["client"]):
        raise BadInput(f"client: {NAME_RULE}", "client")
    order = given.get("order") or ""
    if order not in {"", *ORDERS}:
        raise BadInput(f"order: give one of {', '.join(ORDERS)}", "order")
    found = Filter(**texts, states=states, order=order)
    older_ms, newer_ms = _span("older", found.older), _span("newer", found.newer)
    if newer_ms and newer_ms <= older_ms:
        raise BadInput("newer: give a longer time than for older, or none", "newer")
    return found


def _span(name: str, text: str) -> int:
    try:
        return span_ms(text) if text else 0
    except ValueError as error:
        raise BadInput(f"{name}: {error}", name) from None


def _short(text: str) -> str:
    return cut(printable(text), _MOST_WORDS)


#: Tenants among whose waiting requests one without a ledger is searched.
_MOST_TENANTS: Final = 100
#: What a search has left out, because a limit was reached.
Missed = Literal["entries", "keys", "tenants", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filters, order and limits of a listing."""

    states: frozenset[str] = frozenset(STATES)
    model: str = ""
    client: str = ""
    tenant: str = ""
    id: str = ""
    worker: str = ""  # its present or last worker, with or without its incarnation
    error: str = ""  # part of an error's code or message, in letters of any case
    older_ms: int = 0  # least age
    newer_ms: int = 0  # greatest age; 0: no limit
    until_ms: int = 0  # accepted until this unix time; 0: no limit
    oldest_first: bool = False
    limit: int = 50
    most: int = 100_000  # entries of intakes to read, and as many of lanes
    most_keys: int = 100_000  # to search for ledgers
    most_streams: int = 100_000  # tenants whose intakes are read, and workers whose lanes are
    after: Place | None = None  # only those behind this place
    cursor: int = 0  # only ended ones, from where an earlier search for them has stopped

    @property
    def ended_only(self) -> bool:
        """Whether only ended requests are wanted."""
        return self.states <= TERMINAL

    def fits_ledger(self, now_ms: int, one: Listed) -> bool:
        """Whether a request fits by what is known of it without its result."""
        age_ms = now_ms - one.age_from_ms
        return (
            one.state in self.states
            and self.client in {"", one.client}
            and self.tenant in {"", one.tenant}
            and self.id in {"", one.id}
            and self.worker in {"", one.worker, one.worker.rpartition(".")[0]}
            and age_ms >= self.older_ms
            and (not self.newer_ms or age_ms <= self.newer_ms)
            and (not self.until_ms or one.age_from_ms <= self.until_ms)
            and (self.after is None or self._is_behind(one.place, self.after))
        )

    def fits(self, now_ms: int, one: Listed) -> bool:
        """Whether a request is wanted."""
        return (
            self.fits_ledger(now_ms, one)
            and self.model in {"", one.model}
            and self.error.casefold() in f"{one.error}: {one.message}".casefold()
        )

    def _is_behind(self, place: Place, other: Place) -> bool:
        return place > other if self.oldest_first else place < other

    def stream_bounds(self, now_ms: int) -> tuple[str, str]:
        """The lowest and highest entry id of an intake that can fit."""
        low, high = [], []
        if self.newer_ms:
            low.append(now_ms - self.newer_ms)
        if self.older_ms:
            high.append(now_ms - self.older_ms)
        if self.until_ms:
            high.append(self.until_ms)
        if self.after:
            (low if self.oldest_first else high).append(self.after[0])
        return str(max(0, *low)) if low else "-", str(max(0, min(high))) if high else "+"


@dataclass(frozen=True, slots=True)
class RequestList:
    """The requests of a query."""

    requests: list[Listed]
    now_ms: int
    missed: frozenset[Missed] = field(default_factory=frozenset)
    has_more: bool = False  # than the query's limit
    may_scan: bool = True  # False: the server refuses SCAN, so ended requests are missing
    cursor: int = 0  # where a search for ended ones continues; 0: it is complete

    @property
    def is_whole(self) -> bool:
        """Whether everything was read; else there may be more."""
        return not self.missed


def list_requests(yard: Yard, query: Query) -> RequestList:
    """Find requests, within the limits of the query."""
    return _Search(yard, query).run()


class _Search:
    """One search; what it could not read is in ``missed``."""

    def __init__(self, yard: Yard, query: Query) -> None:
        self._yard = yard
        self._query = query
        self._view = read_yard(yard, counts_lanes=False)
        self._missed: set[Missed] = set()
        self._may_scan = True
        self._cursor = 0
        now_ms = self._view.at_ms
        self._fits: Callable[[Listed], bool] = functools.partial(query.fits, now_ms)
        self._fits_ledger = functools.partial(query.fits_ledger, now_ms)

    def run(self) -> RequestList:
        """Find, order and describe them."""
        found = self._with_id() if self._query.id else self._anywhere()
        return RequestList(
            _detailed(self._yard, self._view, found[: self._query.limit]),
            self._view.at_ms,
            frozenset(self._missed),
            len(found) > self._query.limit,
            self._may_scan,
            self._cursor,
        )

    def _anywhere(self) -> list[Listed]:
        query = self._query
        found = [] if query.cursor else self._first(self._in_flight())
        if query.states & TERMINAL:
            try:
                # First, because a request may have ended since it was read in flight.
                return self._first(itertools.chain(self._ended(), found))
            except NoPermissionError:
                self._may_scan = False
        return found

    def _first(self, found: Iterable[Listed]) -> list[Listed]:
        """The first of the query's order, one more than its limit, without duplicates."""
        pick = heapq.nsmallest if self._query.oldest_first else heapq.nlargest
        return pick(self._query.limit + 1, _each_once(found), key=lambda one: one.place)

    # By id

    def _with_id(self) -> list[Listed]:
        """The requests with an id: of one client by its ledger, else by a search for clients."""
        query = self._query
        found = self._of_clients([query.client or DEFAULT_CLIENT])
        if not query.client:
            try:
                for page in self._scan():
                    found += self._of_clients([client for client, _ in page])
            except NoPermissionError:
                self._may_scan = False
        if not found and "waiting" in query.states:
            budget = Budget(query.most)
            found = [one for name in self._intakes() for one in self._in_intake(name, budget)]
            self._note(budget, "entries")
        return self._first(found)

    def _of_clients(self, clients: Sequence[str]) -> list[Listed]:
        owners = [(client, self._query.id) for client in clients]
        found = [one for one in by_ledger(self._yard, owners) if self._fits_ledger(one)]
        over = with_results(self._yard, [one for one in found if one.is_ended])
        running = [self._with_model(one) for one in found if not one.is_ended]
        return list(filter(self._fits, over + running))

    def _with_model(self, one: Listed) -> Listed:
        request = read_submitted(self._yard, one.client, one.id)
        model = request.model if isinstance(request, Request) else ""
        return msgspec.structs.replace(one, model=model)

    def _in_intake(self, name: str, budget: Budget, **bounds: Any) -> Iterator[Listed]:
        """Waiting requests of an intake, of which those by plain XADD have no ledger yet."""
        found = entries(self._yard.connection, self._yard.keys.intake(name), budget, **bounds)
        return filter(self._fits, in_intake(name, found))

    # In flight

    def _in_flight(self) -> Iterator[Listed]:
        """Waiting and assigned ones, in the direction in which requests move, so none is missed."""
        states = self._query.states
        may_wait = "waiting" in states and not self._query.worker
        budget = Budget(self._query.most)
        if may_wait:
            for name in self._intakes()[:-1]:
                yield from self._waiting(name, budget)
        if "assigned" in states:
            yield from self._assigned()
        if may_wait:
            # The retry intake is not in the order of acceptance, so all of it is read.
            yield from self._in_intake("retry", budget)
        self._note(budget, "entries")

    def _waiting(self, name: str, budget: Budget) -> Iterator[Listed]:
        query = self._query
        low, high = query.stream_bounds(self._view.at_ms)
        enough = query.limit + 1
        bounds = {"low": low, "high": high, "newest_first": not query.oldest_first, "few": enough}
        return itertools.islice(self._in_intake(name, budget, **bounds), enough)

    def _assigned(self) -> Iterator[Listed]:
        query, budget = self._query, Budget(self._query.most)
        workers = [
            one.worker
            for one in sorted(self._view.workers, key=lambda one: not one.lease_ms)
            if query.worker in {"", one.worker, one.worker.rpartition(".")[0]}
        ]
        if len(workers) > query.most_streams:
            self._missed.add("workers")
        for worker in workers[: query.most_streams]:
            lane = entries(self._yard.connection, self._yard.keys.lane(worker), budget)
            yield from filter(self._fits, on_lane(worker, lane))
        self._note(budget, "entries")

    def _intakes(self) -> list[str]:
        """The intakes that may have what is wanted; ``retry`` is last."""
        query = self._query
        if query.tenant:
            return [intake_name(name, query.tenant) for name in PRIORITY_CLASSES] + ["retry"]
        line: Any = self._yard.connection.zcard(self._yard.keys.line)
        if line > query.most_streams:
            self._missed.add("tenants")
        return [name for _, name in intakes(self._yard, query.most_streams)]

    # Ended

    def _ended(self) -> Iterator[Listed]:
        """Ended requests, in no order."""
        for owners in self._scan():
            for page in pages(owners):
                yield from filter(self._fits, self._known(page))

    def _scan(self) -> Iterator[list[Owned]]:
        query, budget = self._query, Budget(self._query.most_keys)
        found = ledgers(
            self._yard, budget, client=query.client, request_id=query.id, cursor=query.cursor
        )
        for cursor, page in found:
            self._cursor = cursor
            yield page
        self._note(budget, "keys")

    def _known(self, owners: Sequence[Owned]) -> list[Listed]:
        """Ended requests by their ledgers, with their results where the query needs these."""
        query = self._query
        found = by_ledger(self._yard, owners)
        wanted = [one for one in found if one.is_ended and self._fits_ledger(one)]
        if query.error:
            wanted = [one for one in wanted if one.state != "completed"]
        if query.model or query.error:
            return with_results(self._yard, wanted)
        return wanted

    def _note(self, budget: Budget, what: Missed) -> None:
        if budget.is_spent:
            self._missed.add(what)


def find_waiting(yard: Yard, is_wanted: Callable[[Listed], bool], most: int) -> Iterator[Listed]:
    """Waiting requests, including those that have no ledger yet; of the next tenants in line."""
    budget = Budget(most)
    for _, name in intakes(yard, _MOST_TENANTS):
        yield from filter(
            is_wanted, in_intake(name, entries(yard.connection, yard.keys.intake(name), budget))
        )


def lane_requests(yard: Yard, worker: str, most: int) -> list[Listed]:
    """The first requests on the lane of a worker incarnation."""
    found: Any = yard.connection.xrange(yard.keys.lane(worker), count=most)
    return list(on_lane(worker, found))


def _each_once(found: Iterable[Listed]) -> Iterator[Listed]:
    seen: set[Owned] = set()
    for one in found:
        if (one.client, one.id) not in seen:
            seen.add((one.client, one.id))
            yield one


def _detailed(yard: Yard, view: YardView, listed: Sequence[Listed]) -> list[Listed]:
    """Add results, token counts and pauses, for the listed requests only."""
    detailed: list[Listed] = []
    of_model = functools.cache(functools.partial(pauses_of_model, view))
    of_worker = functools.cache(functools.partial(pauses_of_worker, view))
    for page in pages(listed):
        over = iter(with_results(yard, [one for one in page if one.is_ended]))
        running = [one for one in page if not one.is_ended]
        lengths = iter(published(yard, running))
        for one in page:
            if one.is_ended:
                detailed.append(next(over))
                continue
            held = of_worker(one.worker) if one.worker else of_model(one.model)
            detailed.append(msgspec.structs.replace(one, tokens=next(lengths), pauses=held))
    return detailed


#: Keys to scan for an id; some seconds on an idle server.
MOST_KEYS: Final = 1_000_000
#: Entries of intakes to read for a request by plain XADD, which has no ledger yet.
MOST_ENTRIES: Final = 2_000


@dataclass(frozen=True, slots=True)
class Owners:
    """The clients that have a request with an id."""

    clients: list[str]  # by name
    is_whole: bool = True  # False: the scan ended at its limit


def find_owners(
    yard: Yard, request_id: str, *, most_keys: int = MOST_KEYS, most_entries: int = MOST_ENTRIES
) -> Owners:
    """Find the clients of an id: first `anon`, then by SCAN, then among the waiting requests.

    If `anon` has the id, no other client is searched.
    """
    run: Any = yard.connection
    if run.exists(yard.keys.ledger(DEFAULT_CLIENT, request_id)):
        return Owners([DEFAULT_CLIENT])
    budget, found = Budget(most_keys), set[str]()
    for _cursor, page in ledgers(yard, budget, request_id=request_id):
        found |= {client for client, _ in page}
    if budget.is_spent:
        return Owners(sorted(found), is_whole=False)
    if not found:
        waiting = find_waiting(yard, lambda one: one.id == request_id, most_entries)
        found = {one.client for one in waiting}
    return Owners(sorted(found))
