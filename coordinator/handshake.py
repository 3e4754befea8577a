"""What the leader publishes for clients, foremost the models that the yard knows."""

from __future__ import annotations

import logging
import types
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
import redis

from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.protocol.keys import TENANT_CAME, Yard
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.streams import whole
from tokenyard.protocol.wire import WIRE_VERSION
from tokenyard.protocol.worker_info import OutputDefaults
from tokenyard.scripts import Scripts
from tokenyard.scripts.calls import Arg

log = logging.getLogger("tokenyard.coordinator.handshake")

#: Whether there are tenants is read again this often, in case an event was lost, and at most each
#: half second, however many events come.
TENANTS_EVERY_S: Final = 60.0
TENANTS_REST_S: Final = 0.5
#: A yard has tenants for this long after one of them has submitted, also if none has settings.
REMEMBERED_MS: Final = 24 * 3600 * 1000
_NONE: Final[Mapping[str, OutputDefaults]] = types.MappingProxyType({})


class Models:
    """Which base model serves a name: its own, or that of an adapter.

    A model stays known when its workers and hosts are away, so that requests for it can wait. The
    only model is among those that are there: others may never come back.
    """

    def __init__(self) -> None:
        self._bases: dict[str, str] = {}  # by name
        #: What the models file sets for requests that do not say how much they may generate.
        self.defaults: Mapping[str, OutputDefaults] = {}
        #: The base model of requests that name none, where exactly one is there; else "". While
        #: none is there, what it was before.
        self.only = ""
        self._servable: frozenset[str] | None = None  # base models; None: none seen yet

    @property
    def names(self) -> list[str]:
        """All names that requests may use, in order."""
        return sorted(self._bases)

    @property
    def served(self) -> list[str]:
        """The names of the models that are there; while none is there, all of them."""
        there = self._servable or self.bases
        return [name for name in self.names if self._bases[name] in there]

    @property
    def bases(self) -> set[str]:
        """The base models."""
        return set(self._bases.values())

    @property
    def adapters(self) -> dict[str, str]:
        """The base model of each adapter."""
        return {name: base for name, base in sorted(self._bases.items()) if name != base}

    def base_of(self, name: str) -> str:
        """The base model that serves requests for ``name``; "" where none is known.

        A request without a name means the only model of the yard.
        """
        return self._bases.get(name, "") if name else self.only

    def learn(
        self,
        bases: Mapping[str, str],
        servable: Collection[str],
        defaults: Mapping[str, OutputDefaults] = _NONE,
    ) -> bool:
        """Add the base models by name that the roster has now; whether anything changed.

        ``servable`` are the base models that living workers hold or their hosts may load. The
        defaults are those of all models that hosts announce now.
        """
        before = self._bases, self.defaults, self.only
        self._bases = self._bases | dict(bases)
        known = {name: one for name, one in self.defaults.items() if name not in bases}
        self.defaults = known | dict(defaults)
        if servable:
            self._servable = frozenset(servable)
            self.only = _sole(servable)
        return (self._bases, self.defaults, self.only) != before

    def recall(
        self,
        names: Collection[str],
        adapters: Mapping[str, str],
        defaults: Mapping[str, OutputDefaults] = _NONE,
        only: str = "",
    ) -> None:
        """Add what an earlier leader published, except where something newer is known."""
        published = {name: adapters.get(name, name) for name in names}
        self.defaults = {
            name: one for name, one in defaults.items() if name not in self._bases
        } | dict(self.defaults)
        self._bases = published | self._bases
        if self._servable is None:
            self.only = only if only in self.bases else _sole(self.bases)


def _sole(models: Collection[str]) -> str:
    """The only one of them; "" where there are none or several."""
    return next(iter(models)) if len(models) == 1 else ""


class TenantPresence:
    """Whether the yard has tenants: then requests without one leave room for them."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard
        self._due = 0.0
        self._read = -TENANTS_REST_S  # monotonic
        self.has_tenants = False

    def hurry(self) -> None:
        """Settings of tenants have changed: read them soon."""
        self._due = min(self._due, self._read + TENANTS_REST_S)

    def refresh(self) -> bool:
        """Read it where that is due; returns whether it has changed."""
        now = clock.monotonic()
        if now < self._due:
            return False
        self._read, self._due = now, now + TENANTS_EVERY_S
        before = self.has_tenants
        try:
            self.has_tenants = self._find()
        except redis.ResponseError as error:  # among others, a user without the right to
            log.warning("cannot read whether the yard has tenants: %s", error)
        return self.has_tenants != before

    def _find(self) -> bool:
        """Whether a tenant has settings, or one has submitted within the last day."""
        pipeline = self._yard.connection.pipeline(transaction=False)
        pipeline.hscan(self._yard.keys.tenants, count=1)
        pipeline.hget(self._yard.keys.tally, TENANT_CAME)
        pipeline.time()
        (cursor, some), came_ms, (seconds, _) = pipeline.execute()
        if cursor or some:
            return True
        ago_ms: int = 1000 * (seconds + 1) - whole(came_ms)
        return 0 <= ago_ms < REMEMBERED_MS


class Handshake:
    """Writes the hash `info`, which clients read before they submit."""

    def __init__(
        self,
        scripts: Scripts,
        settings: CoordinatorSettings,
        models: Models,
        tenants: TenantPresence,
        counts: CoordinatorCounts,
    ) -> None:
        self._yard = scripts.yard
        self._scripts = scripts
        self._models = models
        self._tenants = tenants
        self._counts = counts
        self._settings: Mapping[str, Arg] = {
            "protocol": WIRE_VERSION,
            "coordinator": settings.name,
            "max_num_queued_reqs": settings.max_num_queued_reqs,
            "max_num_queued_tokens": settings.max_num_queued_tokens,
            "max_request_bytes": settings.max_request_bytes,
            "max_normal_share": settings.max_normal_share,
            "max_low_share": settings.max_low_share,
        }

    def publish(self, token: str, *, waiting_clients: int, rate_per_s: float) -> None:
        """Write all of it."""
        self._recall_models()
        info: Mapping[str, Arg] = {
            **self._settings,
            "models": msgspec.json.encode(self._models.names),
            "adapters": msgspec.json.encode(self._models.adapters),
            "default_model": self._models.only,
            "defaults": msgspec.json.encode(self._models.defaults),
            "waiting_clients": waiting_clients,
            "has_tenants": int(self._tenants.has_tenants),
            "rate": round(rate_per_s, 3),
        }
        self._scripts.take_over(token, info)

    @property
    def is_published(self) -> bool:
        """Whether it is there: somebody may delete it, or all keys, under a leader."""
        return self._yard.connection.hget(self._yard.keys.info, "protocol") is not None

    def _recall_models(self) -> None:
        published: Any = self._yard.connection.hmget(
            self._yard.keys.info, "models", "adapters", "defaults", "default_model"
        )
        names, adapters, defaults, only = published
        try:
            self._models.recall(
                msgspec.json.decode(names or b"[]", type=list[str]),
                msgspec.json.decode(adapters or b"{}", type=dict[str, str]),
                msgspec.json.decode(defaults or b"{}", type=dict[str, OutputDefaults]),
                (only or b"").decode(),
            )
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._counts.bad["info"] += 1
            log.warning("cannot read the models in the handshake, writing them again: %s", error)
