"""The weights of a yard's tenants."""

from __future__ import annotations

import json
from collections.abc import Mapping

import redis

from benchmarks.yard import Yard


def set_weights(yard: Yard, weights: Mapping[str, float]) -> None:
    """Set the weight of each tenant."""
    with redis.Redis.from_url(yard.url, socket_timeout=10.0) as connection:
        prefix = f"{{{yard.name}}}"
        for name, weight in weights.items():
            connection.hset(f"{prefix}:tenants", name, json.dumps({"weight": weight}))
