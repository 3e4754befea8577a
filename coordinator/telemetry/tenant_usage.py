"""What tenants used while this coordinator led, from ``usage:<tenant>``, for counters.

Those hashes count by day and are pruned, so their sums may fall. Here only what was added between
two looks counts, so a counter grows as long as the process lives, and what another coordinator has
seen is not counted a second time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from redis.exceptions import NoPermissionError

from tokenyard.protocol.errors import Code
from tokenyard.protocol.streams import whole
from tokenyard.protocol.usage import FAILED, WAIT, day_before, field_of
from tokenyard.protocol.yard import Yard

log = logging.getLogger("tokenyard.coordinator.tenant_usage")

#: What counts as expired, and for scripts as failed.
EXPIRED: Final = FAILED + Code.DEADLINE_EXCEEDED
#: Buckets of waits, in ms: 24 days and less.
WAITS_MS: Final = tuple(2**exponent for exponent in range(32))
#: The counts that are read of each day and model.
WHATS: Final = (
    *("requests", "in", "cached", "out", "failed", EXPIRED, "cancelled"),
    *(f"{WAIT}{bucket}" for bucket in WAITS_MS),
)


class _Tenant:
    """What is known of one."""

    def __init__(self) -> None:
        self.counts = Counter[str](dict.fromkeys(WHATS, 0))
        self.seen: dict[bytes, int] = {}  # by field, at the last look
        self.models: set[str] = set()  # that were looked at before, in this term


class TenantUsageCounts:
    """The counts of some tenants, from the first look at each of them."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._token = ""
        self._day = ""
        self._is_allowed = True

    def read(
        self,
        yard: Yard,
        token: str,
        tenants: Sequence[str],
        models: Collection[str],
    ) -> Mapping[str, Counter[str]]:
        """Look at these tenants, and forget others; their counts by name and what is counted.

        ``token`` is that of the term: what was added between two terms is another leader's.
        ``models`` are all models that the yard knows, by which usage is counted.
        """
        run: Any = yard.connection  # redis-py's replies have no types
        seconds, _ = run.time()
        today = day_before(seconds, 0)
        # Behind midnight once more what was added before it.
        days = sorted({self._day or today, today})
        fields = [(model, field_of(day, model, what), what)
                  for day in days for model in models for what in WHATS]  # fmt: skip
        if token != self._token:
            self._is_allowed = True
            for one in self._tenants.values():
                one.models.clear()
        self._tenants = {name: self._tenants.get(name) or _Tenant() for name in tenants}
        pipeline = run.pipeline(transaction=False)
        for name in tenants:
            pipeline.hmget(yard.keys.usage(name), [field for _, field, _ in fields])
        answers = pipeline.execute(raise_on_error=False) if self._is_allowed else ()
        for one, values in zip(self._tenants.values(), answers, strict=False):
            if isinstance(values, NoPermissionError):
                self._is_allowed = False
            elif isinstance(values, list):  # else it is no hash
                _add(one, fields, values)
                one.models.update(models)
        if not self._is_allowed and answers:
            log.warning("this term has no usage of tenants: the user of Redis may not read it")
        self._token, self._day = token, today
        return {name: one.counts.copy() for name, one in self._tenants.items()}


def _add(
    one: _Tenant, fields: Iterable[tuple[str, bytes, str]], values: Iterable[bytes | None]
) -> None:
    """Count what was added since the last look; of a model that is new, from now on."""
    seen = {}
    for (model, field, what), value in zip(fields, values, strict=True):
        if value is None:
            continue
        seen[field] = count = max(0, whole(value))
        if model in one.models:
            one.counts[what] += max(0, count - one.seen.get(field, 0))
    one.seen = seen
