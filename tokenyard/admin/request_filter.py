"""Which requests are wanted: from what an operator gives to a query, and to words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.admin.listed import IN_FLIGHT, STATES, Place
from tokenyard.admin.requests import Query
from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.keys import NAME_RULE, is_name
from tokenyard.protocol.texts import printable, span_ms
from tokenyard.protocol.wire import MAX_ID_BYTES

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

    def query(
        self,
        *,
        limit: int,
        most: int,
        most_keys: int,
        most_streams: int,
        states: frozenset[str] = frozenset(STATES),
        until_ms: int = 0,
        after: Place | None = None,
        cursor: int = 0,
    ) -> Query:
        """The query for those of its states that are in ``states`` too."""
        return Query(
            states=self.wanted_states & states,
            model=self.model,
            client=self.client,
            tenant=self.tenant,
            id=self.id,
            worker=self.worker,
            error=self.error,
            older_ms=_span("older", self.older),
            newer_ms=_span("newer", self.newer),
            until_ms=until_ms,
            oldest_first=self.oldest_first,
            limit=limit,
            most=most,
            most_keys=most_keys,
            most_streams=most_streams,
            after=after,
            cursor=cursor,
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
    shown = printable(text)
    return shown if len(shown) <= _MOST_WORDS else f"{shown[:_MOST_WORDS]}…"
