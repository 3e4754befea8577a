"""How much work waits and runs in a yard, and how many workers that needs: the leader says it.

It stands in the field ``demand`` of the hash `info`; `/scale` and the metrics show it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.streams import unix_ms
from tokenyard.protocol.yard import Yard

#: The field of `info`.
FIELD: Final = "demand"
#: A leader renews it each second; what is older than this says nothing any more.
FRESH_MS: Final = 30_000


class ModelDemand(Struct, frozen=True):
    """The requests for one model, those of its adapters included."""

    waiting: int = 0  # not on a lane, those of tenants and those in back-off included
    running: int = 0  # on the lanes of its workers
    workers: int = 0  # that these need, and never fewer than are busy or pinned


class YardDemand(Struct, frozen=True):
    """All that waits and runs; ``at_ms`` is by the broker's clock (unix time).

    Under the name "" is what the leader has not read yet, or what names no model.
    """

    at_ms: int
    models: dict[str, ModelDemand]

    def scale(self, model: str | None = None) -> dict[str, Any]:
        """The sums of one model, or of all with each of them, for an autoscaler."""
        if model is not None:
            return {"model": model, **msgspec.structs.asdict(self.models.get(model, _NOTHING))}
        names = msgspec.structs.fields(ModelDemand)
        sums = {
            one.name: sum(getattr(each, one.name) for each in self.models.values()) for one in names
        }
        return {**sums, "models": msgspec.to_builtins(self.models)}


_NOTHING: Final = ModelDemand()


def encode_demand(demand: YardDemand) -> bytes:
    """The value of the field."""
    return msgspec.json.encode(demand)


def read_demand(yard: Yard) -> YardDemand:
    """What the leader says. Raises `BrokerUnavailable` where there is none, or it is too old."""
    pipeline = yard.connection.pipeline(transaction=False)
    pipeline.hget(yard.keys.info, FIELD)
    pipeline.time()
    packed, now = pipeline.execute()
    try:
        demand = msgspec.json.decode(packed or b"", type=YardDemand)
    except msgspec.DecodeError as error:
        raise BrokerUnavailable("no coordinator has said yet what waits") from error
    age_ms = unix_ms(now) - demand.at_ms
    if age_ms > FRESH_MS:
        raise BrokerUnavailable(
            f"no coordinator leads: none has said for {age_ms // 1000} s what waits"
        )
    return demand
