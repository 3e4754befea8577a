"""Lists the requests of a yard in any state: `tokenyard requests`.

Waiting and assigned requests are read from the intakes and lanes, page by page; ended ones from the
ledgers, which SCAN finds. The query limits both. Errors of redis-py pass, for
`tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import msgspec
import redis
from msgspec import Struct
from redis.exceptions import NoPermissionError

from tokenyard.admin.intakes import intakes
from tokenyard.admin.pauses import Pause, pauses_of_model, pauses_of_worker
from tokenyard.admin.snapshot import YardView, read_yard
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.replies import TERMINAL, Result, Status, decode_reply, to_result
from tokenyard.protocol.streams import position, whole
from tokenyard.protocol.wire import Request, Unanswerable

State = Literal["waiting", "assigned", Status]
STATES: Final[tuple[State, ...]] = get_args(State)

#: Entries or ledgers in one read; small, because a request may have some MiB.
_PAGE: Final = 100
#: Keys of one SCAN.
_SCANNED: Final = 1000
_LEDGER_FIELDS: Final = ("state", "sid", "worker", "attempt", "ended")
_TOKEN_BYTES: Final = 4
Fields = Mapping[bytes, bytes]


class Listed(Struct, frozen=True, kw_only=True):
    """One request. Times are unix ms by the server's clock."""

    client: str
    id: str
    state: State
    model: str = ""  # empty: the yard's only one, or unknown
    worker: str = ""  # its present or last worker
    server_id: str = ""  # empty: it was cancelled before its arrival
    accepted_ms: int = 0  # 0: never
    ended_ms: int = 0  # 0: it has no result
    attempt: int = 0  # times that it was assigned, as far as known
    tokens: int = 0  # published so far
    error: str = ""  # error code, if it did not complete
    pauses: Sequence[Pause] = ()  # that it waits for

    @property
    def age_from_ms(self) -> int:
        """When it was accepted; for one that never arrived, when it was cancelled."""
        return self.accepted_ms or self.ended_ms

    @property
    def is_ended(self) -> bool:
        """Whether it has its result."""
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filters, order and limits of a listing."""

    states: frozenset[str] = frozenset(STATES)
    model: str = ""
    client: str = ""
    older_ms: int = 0  # least age
    newer_ms: int = 0  # greatest age; 0: no limit
    oldest_first: bool = False
    limit: int = 50
    most: int = 100_000  # entries of intakes to read, and as many keys

    @property
    def ended_only(self) -> bool:
        """Whether only ended requests are wanted."""
        return self.states <= TERMINAL


@dataclass(frozen=True, slots=True)
class RequestList:
    """The requests of a query."""

    requests: list[Listed]
    now_ms: int
    is_whole: bool = True  # False: a limit was reached, and there may be more
    may_scan: bool = True  # False: the server refuses SCAN, so ended requests are missing


class Budget:
    """A limit on entries or keys to read."""

    def __init__(self, most: int) -> None:
        self._left = most
        self.is_spent = False

    def take(self, count: int) -> bool:
        """Use up ``count``; False if the budget was spent before."""
        self.is_spent = self.is_spent or self._left <= 0
        self._left -= count
        return not self.is_spent


def list_requests(connection: redis.Redis, keys: Keys, query: Query) -> RequestList:
    """Find requests, within the limits of the query."""
    view = read_yard(connection, keys)
    entries, ledgers = Budget(query.most), Budget(query.most)
    fits = functools.partial(_fits, query, view.at_ms)
    found = _first(query, _in_flight(connection, keys, view, query, fits, entries))
    may_scan = True
    if query.states & TERMINAL:
        ended = _ended(connection, keys, query, fits, ledgers)
        try:
            # First, because a request may have ended since it was read in flight.
            found = _first(query, itertools.chain(ended, found))
        except NoPermissionError:
            may_scan = False
    whole = not (entries.is_spent or ledgers.is_spent)
    return RequestList(_detailed(connection, keys, view, found), view.at_ms, whole, may_scan)


def find_waiting(
    connection: redis.Redis, keys: Keys, is_wanted: Callable[[Listed], bool], most: int
) -> Iterator[Listed]:
    """Waiting requests, including those that have no ledger yet."""
    budget = Budget(most)
    for _, name in intakes(connection, keys):
        yield from filter(
            is_wanted, _waiting(name, _entries(connection, keys.intake(name), budget))
        )


def lane_requests(connection: redis.Redis, keys: Keys, worker: str, most: int) -> list[Listed]:
    """The first requests on the lane of a worker incarnation."""
    entries: Any = connection.xrange(keys.lane(worker), count=most)
    found = (_assigned(worker, fields) for _, fields in entries)
    return [one for one in found if one]


def _fits(query: Query, now_ms: int, one: Listed) -> bool:
    age_ms = now_ms - one.age_from_ms
    return (
        one.state in query.states
        and query.client in {"", one.client}
        and (not query.model or query.model == one.model)
        and age_ms >= query.older_ms
        and (not query.newer_ms or age_ms <= query.newer_ms)
    )


def _first(query: Query, found: Iterable[Listed]) -> list[Listed]:
    """The first of the query's order, up to its limit, without duplicates."""
    pick = heapq.nsmallest if query.oldest_first else heapq.nlargest
    return pick(query.limit, _each_once(found), key=_order)


def _order(one: Listed) -> tuple[int, int]:
    """Time of acceptance, then the server's sequence number."""
    return one.age_from_ms, position(one.server_id.rpartition("/")[2])[1]


def _each_once(found: Iterable[Listed]) -> Iterator[Listed]:
    seen: set[tuple[str, str]] = set()
    for one in found:
        if (one.client, one.id) not in seen:
            seen.add((one.client, one.id))
            yield one


def _in_flight(
    connection: redis.Redis,
    keys: Keys,
    view: YardView,
    query: Query,
    fits: Callable[[Listed], bool],
    budget: Budget,
) -> Iterator[Listed]:
    """Waiting and assigned requests, in the direction in which requests move, so none is missed."""
    if "waiting" in query.states:
        for _, name in intakes(connection, keys)[:-1]:
            entries = _entries(
                connection,
                keys.intake(name),
                budget,
                newest_first=not query.oldest_first,
                low=str(view.at_ms - query.newer_ms) if query.newer_ms else "-",
                high=str(view.at_ms - query.older_ms) if query.older_ms else "+",
            )
            yield from itertools.islice(filter(fits, _waiting(name, entries)), query.limit)
    if "assigned" in query.states:
        for worker in view.workers:
            for _, fields in _entries(connection, keys.lane(worker.worker), budget):
                if (one := _assigned(worker.worker, fields)) and fits(one):
                    yield one
    if "waiting" in query.states:
        # The retry intake is not in the order of acceptance, so all of it is read.
        again = _entries(connection, keys.intake("retry"), budget)
        yield from filter(fits, _waiting("retry", again))


def _waiting(name: str, entries: Iterable[tuple[str, Fields]]) -> Iterator[Listed]:
    for entry, fields in entries:
        sid = fields.get(b"sid", b"").decode(errors="replace") if name == "retry" else ""
        if one := _listed(fields, "waiting", sid or f"{name}/{entry}"):
            yield one


def _assigned(worker: str, fields: Fields) -> Listed | None:
    one = _listed(fields, "assigned", fields.get(b"sid", b"").decode(errors="replace"))
    attempt = fields.get(b"attempt", b"")
    if one is None or not attempt.isdigit():
        return None  # a command to the worker
    return msgspec.structs.replace(one, worker=worker, attempt=whole(attempt))


def _listed(fields: Fields, state: State, server_id: str) -> Listed | None:
    request = parse_request(fields)
    if isinstance(request, Unanswerable):
        return None
    return Listed(
        client=request.client,
        id=request.id,
        state=state,
        model=request.model if isinstance(request, Request) else "",
        server_id=server_id,
        accepted_ms=accepted_ms(server_id),
    )


def accepted_ms(server_id: str) -> int:
    """When the request of a server id was accepted, unix ms; 0 if unknown."""
    return position(server_id.rpartition("/")[2])[0]


def _entries(
    connection: redis.Redis,
    stream: str,
    budget: Budget,
    *,
    newest_first: bool = False,
    low: str = "-",
    high: str = "+",
) -> Iterator[tuple[str, Fields]]:
    """The entries of a stream between two ids, in pages."""
    first, last = (high, low) if newest_first else (low, high)
    ask: Any = connection.xrevrange if newest_first else connection.xrange
    while budget.take(_PAGE):
        page = ask(stream, first, last, count=_PAGE)
        for entry, fields in page:
            yield entry.decode(), fields
        if len(page) < _PAGE:
            return
        first = f"({page[-1][0].decode()}"


def _ended(
    connection: redis.Redis,
    keys: Keys,
    query: Query,
    fits: Callable[[Listed], bool],
    budget: Budget,
) -> Iterator[Listed]:
    """Ended requests, in no order."""
    for owners in scan_ledgers(connection, keys, budget, client=query.client):
        for page in _pages(owners):
            found = list(_ledgers(connection, keys, page))
            if query.model:
                found = _with_results(connection, keys, found)
            yield from filter(fits, found)


def scan_ledgers(
    connection: redis.Redis,
    keys: Keys,
    budget: Budget,
    *,
    client: str = "",
    request_id: str = "",
) -> Iterator[list[tuple[str, str]]]:
    """Client and id of each ledger, in pages, optionally of one client or with one id."""
    prefix = keys.ledger("", "").removesuffix("/")
    pattern = f"{_literal(prefix + client)}{'' if client else '*'}/{_literal(request_id)}"
    cursor = 0
    while budget.take(_SCANNED):
        answer: Any = connection.scan(
            cursor, match=pattern if request_id else pattern + "*", count=_SCANNED
        )
        cursor, names = answer
        owners = (
            name.decode(errors="replace").removeprefix(prefix).partition("/") for name in names
        )
        yield [(owner, own) for owner, _, own in owners if request_id in {"", own}]
        if not cursor:
            return


def _literal(text: str) -> str:
    """Escape text for a glob pattern."""
    return "".join(f"\\{one}" if one in "*?[]^\\" else one for one in text)


def _pages(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[at : at + _PAGE] for at in range(0, len(items), _PAGE))


def _ledgers(
    connection: redis.Redis, keys: Keys, owners: Iterable[tuple[str, str]]
) -> Iterator[Listed]:
    """The ended ones among these requests."""
    named = list(owners)
    pipeline = connection.pipeline(transaction=False)
    for client, request_id in named:
        pipeline.hmget(keys.ledger(client, request_id), *_LEDGER_FIELDS)
    for (client, request_id), raw in zip(named, pipeline.execute(), strict=True):
        texts = ((value or b"").decode(errors="replace") for value in raw)
        state, sid, worker, attempt, ended = texts
        if state in TERMINAL:
            yield Listed(
                client=client,
                id=request_id,
                state=state,  # type: ignore[arg-type]
                worker=worker,
                server_id=sid,
                accepted_ms=accepted_ms(sid),
                ended_ms=max(0, whole(ended)),
                attempt=max(0, whole(attempt)),
            )


def _with_results(connection: redis.Redis, keys: Keys, listed: Sequence[Listed]) -> list[Listed]:
    """Add what only results contain: model, tokens, error."""
    pipeline = connection.pipeline(transaction=False)
    for one in listed:
        pipeline.hget(keys.ledger(one.client, one.id), "result")
    return [
        _with_result(one, packed) for one, packed in zip(listed, pipeline.execute(), strict=True)
    ]


def _with_result(one: Listed, packed: bytes | None) -> Listed:
    result: Result | None = None
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        result = to_result(decode_reply(packed)) if packed else None
    if result is None:
        return one
    made = result.provenance
    return msgspec.structs.replace(
        one,
        model=made.model if made else one.model,
        tokens=result.usage.completion_tokens if result.usage else len(result.tokens),
        error=result.error.code if result.error else "",
    )


def _detailed(
    connection: redis.Redis, keys: Keys, view: YardView, listed: Sequence[Listed]
) -> list[Listed]:
    """Add results, token counts and pauses, for the listed requests only."""
    detailed: list[Listed] = []
    of_model = functools.cache(functools.partial(pauses_of_model, view))
    of_worker = functools.cache(functools.partial(pauses_of_worker, view))
    for page in _pages(listed):
        over = iter(_with_results(connection, keys, [one for one in page if one.is_ended]))
        running = [one for one in page if not one.is_ended]
        lengths = iter(_published(connection, keys, running))
        for one in page:
            if one.is_ended:
                detailed.append(next(over))
                continue
            held = of_worker(one.worker) if one.worker else of_model(one.model)
            detailed.append(msgspec.structs.replace(one, tokens=next(lengths), pauses=held))
    return detailed


def _published(connection: redis.Redis, keys: Keys, listed: Sequence[Listed]) -> list[int]:
    pipeline = connection.pipeline(transaction=False)
    for one in listed:
        pipeline.strlen(keys.tokens(one.client, one.id))
    return [length // _TOKEN_BYTES for length in pipeline.execute()]
