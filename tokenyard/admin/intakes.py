"""Which intakes hold requests.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from typing import Any

import redis

from tokenyard.protocol.keys import PRIORITY_CLASSES, IntakeClass, Keys, intake_name


def intakes(connection: redis.Redis, keys: Keys) -> list[tuple[IntakeClass, str]]:
    """Class and name of each intake, of tenants only of those in line; ``retry`` comes last."""
    in_line: Any = connection.zrange(keys.line, 0, -1)
    tenants = ["", *filter(None, (name.decode(errors="replace") for name in in_line))]
    named: list[tuple[IntakeClass, str]] = [
        (priority_class, intake_name(priority_class, tenant))
        for priority_class in PRIORITY_CLASSES
        for tenant in tenants
    ]
    return [*named, ("retry", "retry")]
