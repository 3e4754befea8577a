"""Which of the durabilities that a client may ask for this server can confirm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tokenyard.client.durability import LEVELS, Durability
from tokenyard.doctor.evidence import Evidence

#: The first server with WAITAOF.
_OLDEST: Final = (7, 2)


@dataclass(frozen=True, slots=True)
class Grade:
    """One durability."""

    level: Durability
    is_possible: bool
    why: str  # what it is worth here, or why the server cannot confirm it
    is_certain: bool = True  # whether what it confirms is always so


def durability_grades(evidence: Evidence) -> Iterator[Grade]:
    """Each durability; none where INFO is refused."""
    if evidence.info is None:
        return
    for level in LEVELS:
        match level:
            case "memory":
                yield Grade(level, True, "the server has it in its memory")
            case "disk":
                yield _disk(evidence)
            case "replicated":
                yield _replicated(evidence)


def _disk(evidence: Evidence) -> Grade:
    info = evidence.info or {}
    version = tuple(map(int, re.findall(r"\d+", str(info.get("redis_version", "")))[:2]))
    if not info.get("aof_enabled"):
        return Grade("disk", False, "appendonly is off")
    if version < _OLDEST and "valkey_version" not in info:
        return Grade("disk", False, "the server has no WAITAOF: that needs Redis 7.2 or Valkey")
    how = (evidence.config or {}).get("appendfsync")
    if how == "always":
        return Grade("disk", True, "appendfsync always: it is on the disk")
    if how == "no":
        return Grade("disk", False, "appendfsync no: the server does not tell")
    told = f"appendfsync {how}" if how else "appendfsync cannot be seen"
    why = f"{told}: some servers confirm before it is on the disk; certain under always"
    return Grade("disk", True, why, is_certain=False)


def _replicated(evidence: Evidence) -> Grade:
    info = evidence.info or {}
    count = int(info.get("connected_slaves", 0) or 0)
    states = (info.get(f"slave{number}") for number in range(count))
    online = sum(isinstance(one, dict) and one.get("state") == "online" for one in states)
    if not online:
        return Grade("replicated", False, "no replica is online")
    return Grade("replicated", True, f"replicas online: {online}")
